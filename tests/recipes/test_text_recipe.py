"""The text recipe from its command line, on a tiny random model: a subprocess for each launch, so few launches."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_fsdp.data import recipe_arguments
from tests.recipes import tiny
from tests.recipes.launching import REPOSITORY, launch, losses, metrics, run_recipe

RECIPE = REPOSITORY / "recipes" / "text" / "train.py"
SHIPPED = [f"{model}_{method}" for model in ("llama2_7b", "llama3_1_8b") for method in ("full", "lora", "qlora")]


def _launch(folder: Path, *arguments: str, processes: int = 1, timeout: int = 240) -> subprocess.CompletedProcess[str]:
    return launch(RECIPE, folder, *arguments, processes=processes, timeout=timeout)


def _train(folder: Path, *arguments: str, processes: int = 1) -> str:
    return run_recipe(RECIPE, folder, *arguments, processes=processes)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text_recipe")
    tiny.save_tiny_llama(folder / "model", tiny.smollm2_tokenizer())
    tiny.write_jsonl(folder / "chat.jsonl", tiny.conversations(40))
    tiny.write_jsonl(folder / "pairs.jsonl", [{"question": r["prompt"], "answer": r["completion"]}
                                              for r in tiny.completions(24)])  # fmt: skip
    run = {
        "model_name_or_path": "model",
        "dataset_name": "chat.jsonl",
        "eval_fraction": 0.2,
        "max_steps": 4,
        "learning_rate": "1e-2",
        "global_batch_size": 4,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "max_length": 128,
        "save_strategy": "no",
        "disable_tqdm": True,
        "fsdp": {"precision": "fp32", "activation_checkpointing": "full"},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder


@pytest.fixture(scope="module")
def single(work: Path) -> str:
    """One process: full fine-tuning with every output; its standard output."""
    flags = ("--print_examples", "2", "--report_to", "wandb", "--eval_samples", "2")
    return _train(work, "run.yaml", "--output_dir", "single", *flags)


def test_one_process_leaves_every_output(work: Path, single: str) -> None:
    names = {path.name for path in (work / "single").iterdir()}
    assert {"final", "metrics.jsonl", "resolved_config.yaml"} <= names
    assert len(losses(work / "single")) == 4
    assert losses(work / "single")[-1] < losses(work / "single")[0]
    assert any("eval_loss" in line and line["step"] == 4 for line in metrics(work / "single"))


def test_the_printed_examples_are_the_first_training_samples_with_their_mask(single: str) -> None:
    assert [line.split(":")[0] for line in single.splitlines() if line.startswith("training example")] == [
        "training example 1",
        "training example 2",
    ]
    assert single.count("  loss | It is ") == 2
    assert "0 of 32 samples (0.0%) are cut" in single


def test_eval_samples_shows_answers_to_held_out_questions(work: Path, single: str) -> None:
    lines = [json.loads(line) for line in (work / "single" / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["index"]) for line in lines] == [(4, 0), (4, 1)]
    for line in lines:
        number = int(re.search(r"What is (\d+) and", line["prompt"])[1])
        assert line["reference"] == f"It is {2 * number}."
    assert single.count("hf-fsdp: samples at step 4") == 1


def test_an_offline_wandb_run_prints_its_sync_command(work: Path, single: str) -> None:
    line = next(line for line in single.splitlines() if "wandb sync" in line)
    assert (work / line.rpartition("wandb sync ")[2]).is_dir()


def test_the_final_folder_loads_and_generates_with_the_published_template(work: Path, single: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work / "single" / "final")
    assert tokenizer.chat_template == tiny.SMOLLM2_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(work / "single" / "final")
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert output.shape[1] > inputs["input_ids"].shape[1]


def test_two_sharded_processes_give_the_losses_of_one(work: Path, single: str) -> None:
    output = _train(
        work, "run.yaml", "--output-dir", "sharded", "--require_sharding", "--report_to", "wandb",
        "--save_strategy", "steps", "--save_steps", "2", processes=2,
    )  # fmt: skip
    assert "FSDP audit" in output
    assert (work / "sharded" / "audit.json").is_file()
    (run,) = (work / "sharded" / "wandb").glob("offline-run-*")
    (sent,) = run.glob("*.wandb")  # offline, the records themselves are the only place that holds config and summary
    for key in (b"sharded_share", b"weights_checksum", b"hf_fsdp/not_moved"):
        assert key in sent.read_bytes()
    assert list((run / "files" / "media" / "table" / "hf_fsdp").glob("units*.table.json"))
    one, two = losses(work / "single"), losses(work / "sharded")
    assert two == pytest.approx(one, rel=1e-5)
    norms = [[m["grad_norm"] for m in metrics(work / name) if "grad_norm" in m] for name in ("single", "sharded")]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)

    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(work / name / "final") for name in ("single", "sharded")]
    weights = [dict(model.named_parameters()) for model in models]
    for name, weight in weights[0].items():
        # AdamW turns a gradient that is truly zero plus noise into a whole step, so the bar is on the tensor.
        assert (weight - weights[1][name]).norm() <= 1e-3 * weight.norm(), name


def test_one_process_goes_on_where_two_were_cut_off(work: Path, single: str) -> None:
    """Two processes saved steps 2 and 4; the later one is made one that was never committed."""
    folder = work / "sharded"
    (folder / "checkpoint-4" / "manifest.json").unlink()
    output = _train(
        work, "run.yaml", "--output_dir", "sharded", "--resume_from_checkpoint", "true", "--report_to", "none"
    )
    assert "resume: checkpoint-4 is skipped: incomplete: it has no manifest.json" in output
    assert "resume: sharded/checkpoint-2 (step 2)" in output
    # The file of metrics goes on too: steps 1 and 2 are those of the first launch.
    assert losses(folder) == pytest.approx(losses(work / "single"), rel=1e-5)
    assert [line["step"] for line in metrics(folder) if "loss" in line] == [1, 2, 3, 4]


def test_the_resolved_config_starts_the_same_run_again(work: Path, single: str) -> None:
    _train(work, "single/resolved_config.yaml", "--output_dir", "again", "--report_to", "none")
    assert losses(work / "again") == pytest.approx(losses(work / "single"), rel=1e-6)


# PEFT asks transformers by a name that transformers is about to drop.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_qlora_on_two_processes_gives_the_losses_of_one_and_an_adapter_that_loads(work: Path) -> None:
    flags = ["--load_in_4bit", "--use_bnb_nested_quant", "--use_peft", "--lora_r", "4", "--lora_dropout", "0",
             "--lora_target_modules", "all-linear", "--eval_strategy", "steps", "--eval_steps", "1",
             "--report_to", "none"]  # fmt: skip
    single = _train(work, "run.yaml", *flags, "--output_dir", "qlora_one")
    output = _train(work, "run.yaml", *flags, "--output_dir", "qlora_two", "--require_sharding", processes=2)
    said = "28 adapter weights beside 4-bit layers were in bfloat16 and are stored in float32"
    assert single.count(said) == output.count(said) == 1
    audit = json.loads((work / "qlora_two" / "audit.json").read_text())
    assert audit["sharded_share"] == 1.0 and {unit["storage"] for unit in audit["units"]} == {"float32"}
    assert any("14 layers in 4 bits (nf4, scales quantized again)" in note for note in audit["notes"])
    one, two = work / "qlora_one", work / "qlora_two"
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    evaluations = [[m["eval_loss"] for m in metrics(folder) if "eval_loss" in m] for folder in (one, two)]
    assert len(evaluations[0]) >= 4 and evaluations[1] == pytest.approx(evaluations[0], rel=1e-4)

    from peft import AutoPeftModelForCausalLM
    from transformers import BitsAndBytesConfig

    models = [
        AutoPeftModelForCausalLM.from_pretrained(
            folder / "final", dtype="float32", quantization_config=BitsAndBytesConfig(load_in_4bit=True)
        )
        for folder in (one, two)
    ]
    adapters = [{n: p for n, p in model.named_parameters() if "lora_" in n} for model in models]
    assert len(adapters[0]) == 28 and {str(p.dtype) for p in adapters[0].values()} == {"torch.float32"}
    for name, weight in adapters[0].items():
        assert weight.abs().sum() > 0, name
        assert (weight - adapters[1][name]).norm() <= 1e-3 * weight.norm(), name


# PEFT asks transformers by a name that transformers is about to drop.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_on_completions_saves_an_adapter_that_peft_loads(work: Path) -> None:
    output = _train(
        work, "run.yaml", "--dataset_name=pairs.jsonl", "--rename_columns", "question=prompt", "answer=completion",
        "--use_peft", "--lora_r", "4", "--lora_target_modules", "all-linear", "--output_dir", "lora",
        "--print_examples", "1", processes=2,
    )  # fmt: skip
    assert "(prompt_completion)" in output
    # The end token counts, though pad and eos are one token in this tokenizer.
    assert "  loss |  It is" in output and "<|im_end|>" in output.partition("loss |")[2].splitlines()[0]

    assert (work / "lora" / "audit.json").is_file()
    from peft import AutoPeftModelForCausalLM

    model = AutoPeftModelForCausalLM.from_pretrained(work / "lora" / "final")
    trained = [weight for name, weight in model.named_parameters() if "lora_B" in name]
    assert len(trained) == 14
    assert all(weight.abs().sum() > 0 for weight in trained)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--dataset_name", "chta.jsonl"], "DataError: dataset_name='chta.jsonl': there is no such file or folder"),
        (["--model_name_or_path", "no/such-model"], "ModelAccessError: model_name_or_path='no/such-model' is not in"),
        (["--global_batch_size", "3"], "ConfigError: global_batch_size=3 is not a multiple of"),
        (["--global_batch_size", "0"], "ConfigError: global_batch_size=0 is below 1"),
        (["--learning_rate", "nan"], "ConfigError: learning_rate=nan is not a finite number"),
        (["--per_device_train_batch_size", "0"], "ConfigError: per_device_train_batch_size=0 is below 1"),
        (["--seed", "-1"], "ConfigError: seed=-1 is below 0"),
        (["--lerning_rate", "1"], "ConfigError: --lerning_rate is not a flag of this recipe"),
        (["--max_steps", "1", "extra"], "ConfigError: 'extra' belongs to no flag"),
        (["--config", "run.yaml"], "ConfigError: there is more than one run config: run.yaml, run.yaml"),
        (["--fsdp", "full_shard"], "ConfigError: --fsdp 'full_shard': the fsdp section is changed a key at a time"),
        (["--fsdp.wrap", "[A"], "ConfigError: --fsdp.wrap '[A' is not valid YAML"),
        (["--output_dir", "run.yaml/x"], "ConfigError: output_dir='run.yaml/x' cannot be written: Not a directory"),
        (["--optim", "adamw_trch"], "ConfigError: optim: invalid choice: 'adamw_trch'"),
        (["--load_in_4bit"], "ConfigError: load_in_4bit without use_peft: weights in 4 bits have no gradient"),
        (["--load_in_8bit"], "ConfigError: load_in_8bit has no shards that train"),
        (["--gradient_accumulation_steps", "7"], "ConfigError: gradient_accumulation_steps=7 contradicts"),
        (["--max_length", "20"], "DataError: max_length=20 cuts off the whole answer of every sample"),
        (["--require_sharding"], "ShardingError: sharding.require_sharding is true and there is one process"),
    ],
)
def test_mistakes_end_in_one_clear_error(
    work: Path, arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # In this process: what is tested is the recipe's own order of checks, and a launch costs ten seconds.
    from hf_fsdp.errors import HfFsdpError

    train = _load_recipe()
    monkeypatch.chdir(work)
    with pytest.raises(HfFsdpError, match=re.escape(expected.partition(": ")[2])) as caught:
        train.main(["run.yaml", "--output_dir", "refused", *arguments])
    assert type(caught.value).__name__ == expected.partition(":")[0]
    assert not (work / "refused" / "final").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--resume_from_checkpoint", "runs/checkpoint-3"], "the folder does not exist"),
        (["--resume_from_checkpoint", "last"], "there is no checkpoint in refused"),
        (["--output_dir", "chat.jsonl"], "cannot be written: File exists"),
    ],
)
def test_the_run_folder_is_checked_before_data_and_model(
    work: Path, arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_fsdp.errors import ConfigError

    train = _load_recipe()
    monkeypatch.chdir(work)
    with pytest.raises(ConfigError, match=expected):
        train.main(["run.yaml", "--output_dir", "refused", "--dataset_name", "no.jsonl", *arguments])


def _load_recipe() -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location("text_recipe", RECIPE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["text_recipe"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_command_line_shows_an_error_without_a_traceback(work: Path) -> None:
    done = _launch(work, "run.yaml", "--fsdp.precision", "fp17")
    assert done.returncode == 1
    assert "ConfigError: precision.preset" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_run_configs_parse_on_eight_processes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train = _load_recipe()
    monkeypatch.setattr(recipe_arguments, "launched_processes", lambda: 8)
    path = REPOSITORY / "configs" / "train" / f"{name}.yaml"
    fsdp, recipe, script, training, model = train.read_arguments([str(path), "--report_to", "none"])
    assert training.gradient_accumulation_steps * training.per_device_train_batch_size * 8 == recipe.global_batch_size
    assert fsdp.precision.preset == "bf16-mixed" and training.bf16
    assert not training.gradient_checkpointing and fsdp.activation_checkpointing.mode == "full"
    assert model.use_peft == name.endswith("lora") and model.load_in_4bit == name.endswith("qlora")
    assert (training.learning_rate, training.max_length) == (2e-4 if model.use_peft else 2e-5, 4096)
    assert script.dataset_name and training.eval_strategy != "no"
    # Precision is said once, so one override is enough.
    fsdp, _, _, training, _ = train.read_arguments([str(path), "--fsdp.precision", "fp32", "--report_to", "none"])
    assert fsdp.precision.preset == "fp32" and not training.bf16


@pytest.mark.parametrize("name", SHIPPED)
def test_every_value_of_a_shipped_run_config_says_where_it_comes_from(name: str) -> None:
    lines = (REPOSITORY / "configs" / "train" / f"{name}.yaml").read_text().splitlines()
    values = [line for line in lines if line.strip() and not line.lstrip().startswith("#") and line != "fsdp:"]
    assert values and not [line for line in values if "# " not in line]
