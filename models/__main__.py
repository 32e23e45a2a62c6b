"""`python -m hybridkv_models [FILE.md]`: the table of model types, printed or written into a page."""

from __future__ import annotations

import sys
from pathlib import Path

from hybridkv_models._table import table, write

if len(sys.argv) > 1:
    write(Path(sys.argv[1]))
else:
    print(table())
