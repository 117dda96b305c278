"""The files that `hf-fsdp plan --write DIR` leaves: what starts the planned run as it was planned."""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from hf_fsdp.config.generate import LaunchPlan, write_launch_file
from hf_fsdp.config.presets import ModelFacts
from hf_fsdp.errors import PlanError, Problem
from hf_fsdp.plan.candidate import Candidate, Plan
from hf_fsdp.plan.report.document import plan_to_json
from hf_fsdp.plan.report.run_file import DATA_PLACEHOLDER, one_line, recipe_script, settle_config, write_run_file
from hf_fsdp.plan.report.whole_files import write_whole

LAUNCH_FILE, CONFIG_FILE, RUN_FILE, PLAN_FILE = "accelerate.yaml", "fsdp.yaml", "train.yaml", "plan.json"
DEFAULT_FOLDER = "planned"


@dataclass(frozen=True, kw_only=True)
class WrittenPlan:
    """What was written, and how the run is started.

    Args:
        paths: the files, in the order in which they are read.
        command: for a shell; the name of a data set is still to be put in.
    """

    paths: tuple[Path, ...]
    command: str


def write_plan(plan: Plan, folder: str | Path, *, rank: int = 1, force: bool = False) -> WrittenPlan:
    """Write the launch file, the sharding config, the run config and the plan of one candidate.

    Args:
        plan: with at least one candidate that fits.
        folder: made if it does not exist; other files in it stay as they are.
        rank: which of the fitting candidates, from 1.
        force: replace files of these names.

    Raises:
        PlanError: nothing of that rank fits, it is no FSDP run, files exist (all of them are named), or the folder
            cannot be written.

    Example::

        write_plan(plan, "planned").command
        # 'accelerate launch --config_file planned/accelerate.yaml recipes/text/train.py planned/train.yaml ...'
    """
    texts = plan_files(plan, folder, rank=rank)
    paths = {name: Path(folder) / name for name in texts}
    taken = [path for path in paths.values() if path.exists() and not (force and path.is_file())]
    if taken:
        raise PlanError(
            [
                Problem(
                    message=f"--write {folder}: {path} exists and is not overwritten"
                    if path.is_file()
                    else f"--write {folder}: {path} is not a file",
                    fix="--force replaces it; or --write another folder"
                    if path.is_file()
                    else "--write another folder",
                )
                for path in taken
            ]
        )
    try:
        write_whole({paths[name]: text for name, text in texts.items()})
    except OSError as error:
        raise PlanError(
            f"--write {folder} cannot be written: {error.strerror or error}", fix="--write a folder of this user's"
        ) from None
    return WrittenPlan(paths=tuple(paths.values()), command=launch_command(plan, folder))


def plan_files(plan: Plan, folder: str | Path, *, rank: int = 1) -> dict[str, str]:
    """Return name -> text of the files of one candidate; `folder` is only for the commands in them."""
    candidate = _candidate(plan, rank)
    config = settle_config(candidate.job)
    return {
        LAUNCH_FILE: write_launch_file(config, _launch_plan(plan, folder)),
        CONFIG_FILE: config.to_yaml(),
        RUN_FILE: write_run_file(plan, candidate, config, launch_command(plan, folder)),
        PLAN_FILE: json.dumps(plan_to_json(dataclasses.replace(plan, candidates=(candidate,))), indent=2) + "\n",
    }


def launch_command(plan: Plan, folder: str | Path) -> str:
    """Return the command that starts the run from the files in `folder`."""
    parts = ["accelerate", "launch", "--config_file", str(Path(folder) / LAUNCH_FILE)]
    if plan.request.num_machines > 1:
        parts += ["--machine_rank", "RANK", "--main_process_ip", "ADDRESS_OF_MACHINE_0"]
    parts += [recipe_script(plan), str(Path(folder) / RUN_FILE), "--dataset_name", DATA_PLACEHOLDER]
    return shlex.join(parts)


def _candidate(plan: Plan, rank: int) -> Candidate:
    if not 1 <= rank <= len(plan.fitting):
        fix = f"a rank from 1 to {len(plan.fitting)}" if plan.fitting else "--min-gpus names GPUs that do it"
        raise PlanError(f"no candidate #{rank} fits, so there is nothing to write", fix=fix)
    candidate = plan.fitting[rank - 1]
    if candidate.job.strategy != "fsdp":
        others = [place for place, item in enumerate(plan.fitting, start=1) if item.job.strategy == "fsdp"]
        raise PlanError(
            f"candidate #{rank} is {candidate.job.strategy.upper()}, for comparison only: hf-fsdp trains FSDP",
            fix=f"write candidate #{others[0]}" if others else "plan without --compare",
        )
    return candidate


def _launch_plan(plan: Plan, folder: str | Path) -> LaunchPlan:
    request = plan.request
    name = request.model.name
    is_packed = request.method.name == "qlora"  # the size in the file's comments is that of 16 bits a weight
    return LaunchPlan(
        num_processes=request.num_gpus,
        num_machines=request.num_machines,
        gpu=request.gpus.gpu,
        model=ModelFacts(
            name=name,
            layer_class=plan.layer_class,
            num_layers=plan.num_layers,
            num_parameters=None if is_packed else plan.num_parameters,
        ),
        purpose=f"{request.method.name} fine-tuning of {one_line(name)}",
        command=one_line(plan.command) or None,
        callback=f"FSDPCallback(FSDPConfig.from_yaml({one_line(str(Path(folder) / CONFIG_FILE))!r}))",
        config_files=(RUN_FILE, CONFIG_FILE),
    )
