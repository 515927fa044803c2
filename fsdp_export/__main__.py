"""`python -m fsdp_export`, and `torchrun ... -m fsdp_export`."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="fsdp-export")
