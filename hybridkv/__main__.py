"""`python -m hybridkv` is the `hybridkv` command."""

from hybridkv.cli import app

if __name__ == "__main__":
    app(prog_name="hybridkv")
