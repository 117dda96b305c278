"""`hf-fsdp checkpoint`: look at a run's checkpoints, verify them, delete old ones, and export a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_fsdp.cli.terminal import errors_for_scripts, print_json, print_table, progress_bar, say
from hf_fsdp.errors import ConfigError

if TYPE_CHECKING:
    from hf_fsdp.cli.prune import PruneAction

checkpoint_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, inspect, verify, prune and export checkpoints. Every command takes --json.",
)

Folder = Annotated[str, typer.Argument(metavar="DIR", help="A run folder, or one checkpoint-N in it.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts, and nothing else on stdout.")]


def _folder(name: str) -> Path:
    path = Path(name)
    if not path.is_dir():
        raise ConfigError(f"{name} is no folder", fix="the output_dir of a run, or a checkpoint-N in it")
    return path


@checkpoint_app.command("list")
def list_command(folder: Folder, as_json: Json = False) -> None:
    """Show every checkpoint of a run: step, size, content, and whether it is committed or why not.

    Exit codes: 0; 2 when DIR is no folder.
    """
    with errors_for_scripts(as_json=as_json):
        from hf_fsdp.cli.checkpoint_view import LIST_HEADER, list_row, look

        looks = look(_folder(folder))
        if as_json:
            print_json({"folder": folder, "checkpoints": [item.to_json() for item in looks]})
        elif looks:
            print_table(LIST_HEADER, [list_row(item) for item in looks], right=(0, 3, 4))
        else:
            say(f"no checkpoints in {folder}")


@checkpoint_app.command("inspect")
def inspect_command(
    folder: Folder,
    tensors: Annotated[bool, typer.Option("--tensors", help="Show every tensor, not blocks of them.")] = False,
    as_json: Json = False,
) -> None:
    """Show what one checkpoint holds (of a run: the newest): tensors, optimizer, data position, versions.

    Exit codes: 0; 1 when it is damaged or not committed; 2 when DIR is no folder.
    """
    with errors_for_scripts(as_json=as_json):
        from hf_fsdp.cli.inspect_view import TENSOR_HEADER, describe, summary_lines, table_rows

        content = describe(_folder(folder), with_tensors=tensors)
        if as_json:
            print_json(content)
            return
        for line in summary_lines(content):
            say(line)
        print_table(TENSOR_HEADER, table_rows(content, with_tensors=tensors), right=(1, 2, 4))


@checkpoint_app.command("verify")
def verify_command(
    folder: Folder,
    quick: Annotated[bool, typer.Option("--quick", help="Sizes and headers only, without reading every byte.")] = False,
    as_json: Json = False,
) -> None:
    """Check one checkpoint, or all of a run: sizes, headers, that every tensor is whole, and the hash of every file.

    Exit codes: 0 when all are whole; 1 when anything is damaged, or there is no checkpoint; 2 when DIR is no folder.
    """
    with errors_for_scripts(as_json=as_json):
        from hf_fsdp.cli.checkpoint_view import look, verify_look

        looks = look(_folder(folder))
        total = sum(item.num_bytes for item in looks if item.is_committed)
        with progress_bar("verify", quiet=as_json or quick) as advance:
            done = 0

            def count(num_bytes: int) -> None:
                nonlocal done
                done += num_bytes
                advance(done, total)

            results = [verify_look(item, hashes=not quick, on_bytes=count) for item in looks]
        is_ok = bool(results) and all(result["ok"] for result in results)
        if as_json:
            print_json({"folder": folder, "ok": is_ok, "hashes": not quick, "checkpoints": results})
        else:
            _print_results(folder, results, quick)
        if not is_ok:
            raise typer.Exit(1)


def _print_results(folder: str, results: list[dict[str, Any]], quick: bool) -> None:
    for result in results:
        word = {"committed": "whole" if not quick else "whole as far as headers tell"}.get(
            result["state"], "not verified"
        )
        say(f"{result['name']}: {word if result['ok'] else 'DAMAGED'}{_reason(result)}")
        for problem in result["problems"]:
            say("  " + problem["message"].replace("\n", "\n  "))
    if not results:
        say(f"no checkpoints in {folder}")


def _reason(result: dict[str, Any]) -> str:
    return f" ({result['note']})" if result["note"] else ""


@checkpoint_app.command("prune")
def prune_command(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A run folder.")],
    keep: Annotated[
        int | None, typer.Option("--keep", metavar="N", min=1, help="Keep the newest N, and the best one.")
    ] = None,
    leftovers: Annotated[
        bool, typer.Option("--leftovers", help="Delete what saves that died left, if nobody wrote to it for a while.")
    ] = False,
    skip_hashes: Annotated[
        bool, typer.Option("--skip-hashes", help="Do not read those that stay; else a damaged one does not count.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Delete the oldest committed checkpoints; never the newest, the best, a damaged one or another program's.

    Exit codes: 0; 1 when something could not be deleted, or the answer was no; 2 when DIR is no folder, or no answer
    can be given.
    """
    with errors_for_scripts(as_json=as_json):
        from hf_fsdp.cli.prune import plan_prune, run_prune

        if keep is None and not leftovers:
            raise ConfigError("prune was not told what to delete", fix="--keep 3, or --leftovers")
        plan = plan_prune(_folder(folder), keep, leftovers, hashes=not skip_hashes)
        if plan.delete and not (dry_run or yes):
            _ask(plan.delete, as_json)
        if not dry_run:
            run_prune(plan)
        if as_json:
            print_json({"folder": folder, "dry_run": dry_run, **plan.to_json()})
        else:
            for line in plan.lines(dry_run=dry_run):
                say(line)
        if plan.failed:
            raise typer.Exit(1)


def _ask(actions: list[PruneAction], as_json: bool) -> None:
    import sys

    if as_json or not sys.stdin.isatty():
        raise ConfigError(f"folders would be deleted ({len(actions)}), and nobody is there to ask", fix="--yes")
    for action in actions:
        say(f"delete {action.path.name}: {action.reason}")
    if not typer.confirm("delete them?"):
        raise typer.Exit(1)


@checkpoint_app.command("export")
def export_command(
    folder: Folder,
    output: Annotated[str, typer.Option("-o", "--output", metavar="OUT", help="The new folder.")],
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", metavar="auto|bf16|fp16|fp32|saved", help="auto: as the model was loaded; saved: as trained."
        ),
    ] = "auto",
    merge_lora: Annotated[
        bool, typer.Option("--merge-lora", help="Write the base model with the adapter merged into it.")
    ] = False,
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", metavar="SIZE", help="Of one file.")] = "5GB",
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="NAME_OR_DIR", help="Base model of an adapter; config of a bare checkpoint."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is an exported model.")] = False,
    skip_hashes: Annotated[
        bool, typer.Option("--skip-hashes", help="Do not compare the bytes with the manifest; just verified ones only.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint (of a run: the newest) as a folder that from_pretrained, or PEFT for an adapter, loads.

    Exit codes: 0; 1 when the checkpoint is damaged or does not fit its config, and when the disk is full; 2 when the
    command is wrong: no such folder, OUT is taken, options that do not go together.
    """
    with errors_for_scripts(as_json=as_json):
        import dataclasses

        from hf_fsdp.checkpoint.export import ExportOptions, export_checkpoint
        from hf_fsdp.checkpoint.serving import serving_lines
        from hf_fsdp.units import format_bytes

        options = ExportOptions(
            dtype=dtype,
            merge_lora=merge_lora,
            max_shard_size=max_shard_size,
            force=force,
            base=base,
            check_hashes=not skip_hashes,
        )
        with progress_bar("export", quiet=as_json) as advance:
            report = export_checkpoint(_folder(folder), Path(output), options, advance)
        lines = [str(line) for line in serving_lines(output, base=base)]
        if as_json:
            content = {**dataclasses.asdict(report), "path": output, "checkpoint": str(report.checkpoint)}
            print_json({**content, "serving": lines})
            return
        for line in report.lines:
            say(line)
        say(
            f"wrote {output}: {report.kind} from {report.checkpoint.name}, {report.num_tensors} tensors, "
            f"{format_bytes(report.num_bytes)} in {report.dtype}, {report.seconds:.1f} s; every tensor reads back equal"
        )
        for line in lines:
            say(line)
