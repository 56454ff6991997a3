"""`medseg export` from a checkout; see README.md."""

from medseg.commands.entry import run_command

if __name__ == "__main__":
    run_command("export")
