"""GPU report: tests, memory of twelve configurations, ladder, and inference benchmark.

    make gpu                                # or: python benchmarks/gpu.py <folder>

Each part runs in processes of its own. Writes `gpu.md` into the folder, with one table per part; a
failed part does not stop the others.
"""

import subprocess
import sys
from pathlib import Path

import torch

from medseg.config.overrides import text_of
from medseg.console import say
from medseg.errors import EXIT_FAILED, EXIT_USER_ERROR
from medseg.io.atomic import replace_text
from medseg.io.tables import markdown_table, read_csv

ROOT = Path(__file__).resolve().parents[1]
# Arguments of each configuration by name; each uses memory in a different way.
CONFIGURATIONS = {
    "fp32": ["memory.precision=fp32"],
    "tf32": ["memory.precision=tf32"],
    "bf16": ["memory.precision=bf16"],
    "fp16": ["memory.precision=fp16"],
    "checkpointing sqrt": ["memory.precision=bf16", "memory.checkpointing=sqrt"],
    "checkpointing all": ["memory.precision=bf16", "memory.checkpointing=all"],
    "offload": ["memory.precision=bf16", "memory.offload=true"],
    "channels last": ["memory.precision=bf16", "memory.channels_last=true"],
    "accumulate": ["memory.precision=bf16", "stage.batch_size=2", "memory.accumulate=2"],
    "group norm": ["memory.precision=bf16", "model.norm=group"],
    "lean": ["experiment=fine_lean"],
    "adamw": ["memory.precision=bf16", "optimizer=adamw"],
}
COLUMNS = {
    "row": "",
    "precision": "precision",
    "checkpointing": "checkpointing",
    "saved_bytes_per_voxel": "saved B/voxel",
    "peak_mib": "planned MiB",
    "peak_allocated_mib": "allocated MiB",
    "ratio": "allocated / planned",
    "seconds_per_step": "s/step",
    "device": "device",
}


def main() -> None:
    """Run all parts and write the report."""
    if not torch.cuda.is_available():
        say(
            "make gpu: torch sees no NVIDIA GPU on this machine; "
            "run it on a machine with one, with a CUDA build of torch"
        )
        sys.exit(EXIT_USER_ERROR)
    output = Path(sys.argv[1] if len(sys.argv) > 1 else "gpu").absolute()
    texts = [f"# {torch.cuda.get_device_name()}, torch {torch.__version__}\n"]
    has_failed = False
    for title, command in list_parts(output).items():
        print(f"\n$ python {' '.join(command)}", flush=True)
        process = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            check=False,
        )
        print(process.stdout, end="", flush=True)
        heading = f"## {title}"
        if process.returncode != 0:
            has_failed = True
            heading += f" (exit code {process.returncode})"
        texts.append(f"{heading}\n\n{describe_part(title, process, output)}")
        replace_text(output / "gpu.md", "\n".join(texts))
    print(f"\n{output / 'gpu.md'}")
    sys.exit(EXIT_FAILED if has_failed else 0)


def list_parts(output: Path) -> dict[str, list[str]]:
    """Title of each part to the arguments of Python."""
    medseg = ["-m", "medseg.commands.cli"]
    networks = ", ".join(
        f"{name}: {text_of(arguments)}" for name, arguments in CONFIGURATIONS.items()
    )
    # The rows of the ladder are replaced by our configurations.
    rows = ["~rows", "+rows={}", f"networks={{{networks}}}"]
    return {
        "Tests": ["-m", "pytest", "-m", "gpu", "-q", str(ROOT / "tests")],
        "Plan": [*medseg, "ladder", f"output={output / 'plan'}", *rows],
        "Ladder": [*medseg, "ladder", f"output={output / 'ladder'}", "peers=true"],
        "Inference": [str(ROOT / "benchmarks" / "inference.py"), f"output={output / 'inference'}"],
    }


def describe_part(title: str, process: subprocess.CompletedProcess[str], output: Path) -> str:
    """Say what a part has found: its table, else what it printed; of the tests the last line."""
    lines = process.stdout.strip().splitlines() or [f"exit code {process.returncode}"]
    if title == "Tests":
        return f"{lines[-1]}\n"
    table = output / title.lower() / "ladder.csv"
    if table.is_file():
        return memory_table(table)
    return "\n".join(lines)


def memory_table(path: Path) -> str:
    """Format `ladder.csv` with the ratio of allocated to planned memory."""
    rows = []
    for row in read_csv(path):
        ratio = ""
        if row["peak_allocated_mib"]:
            ratio = f"{float(row['peak_allocated_mib']) / float(row['peak_mib']):.3f}"
        rows.append({**row, "ratio": ratio})
    return markdown_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
