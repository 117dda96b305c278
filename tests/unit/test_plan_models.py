"""MODEL as people type it: what it resolves to, and one clear refusal for each way in which it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub import errors as hub

from hf_fsdp.errors import PlanError
from hf_fsdp.plan.job import ModelSpec
from hf_fsdp.plan.models.image_tokens import image_tokens
from hf_fsdp.plan.models.model_config import model_kind, read_config
from hf_fsdp.plan.models.positions import max_positions
from hf_fsdp.plan.models.resolve import resolve_model

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 100,
}


def write_config(folder: Path, config: Any = None, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, str) else json.dumps({**TINY, **changes} if config is None else config)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def cache_config(cache: Path, name: str, config: dict[str, Any], revision: str = "main") -> None:
    """Lay a config.json into a hub cache, as a download leaves it."""
    repository = cache / f"models--{name.replace('/', '--')}"
    commit = "0123456789" * 4
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / revision).write_text(commit)
    write_config(repository / "snapshots" / commit, config)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def refuse(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def download(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)


def http_error(kind: type[Exception], status: int) -> Exception:
    response = httpx2.Response(status, request=httpx2.Request("GET", "https://huggingface.co"))
    return kind("refused", response=response)  # type: ignore[call-arg]


def problem_of(text: str, **options: Any) -> str:
    with pytest.raises(PlanError) as raised:
        resolve_model(text, **options)
    assert len(raised.value.problems) == 1
    return str(raised.value)


# What is found.


def test_a_folder_and_its_config_file_are_the_same_model(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "mine")
    by_folder, by_file = resolve_model(str(folder)), resolve_model(str(folder / "config.json"))
    assert by_folder == ModelSpec(name=str(folder), config=TINY)
    assert by_file.config == by_folder.config
    assert read_config(by_file).hidden_size == 64


def test_a_model_folder_goes_before_a_built_in_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()  # outputs of a run, say
    assert resolve_model("gpt2").name == "openai-community/gpt2"
    write_config(tmp_path / "gpt2")
    assert resolve_model("gpt2").config == TINY


def test_a_built_in_name_never_asks_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, AssertionError("asked"))
    assert resolve_model("meta-llama/Llama-3.1-8B-Instruct").num_parameters == 8_030_261_248


def test_the_address_of_a_page_is_its_hub_id() -> None:
    assert resolve_model("https://huggingface.co/Qwen/Qwen3-8B/").name == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("name", "config"),
    [
        # Published files leave out what the class has as its default, and older ones have no text_config.
        (
            "qwen2.5-vl-7b",
            {
                "model_type": "qwen2_5_vl",
                "hidden_size": 3584,
                "intermediate_size": 18944,
                "max_position_embeddings": 128000,
                "num_attention_heads": 28,
                "num_hidden_layers": 28,
                "num_key_value_heads": 4,
                "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "mrope"},
                "tie_word_embeddings": False,
                "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
                "vocab_size": 152064,
            },
        ),
        (
            "gemma-3-4b",
            {
                "model_type": "gemma3",
                "text_config": {
                    "hidden_size": 2560,
                    "intermediate_size": 10240,
                    "model_type": "gemma3_text",
                    "num_hidden_layers": 34,
                    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                    "sliding_window": 1024,
                },
                "vision_config": {
                    "hidden_size": 1152,
                    "image_size": 896,
                    "intermediate_size": 4304,
                    "model_type": "siglip_vision_model",
                    "num_attention_heads": 16,
                    "num_hidden_layers": 27,
                    "patch_size": 14,
                },
            },
        ),
    ],
)
def test_short_and_flat_files_are_the_same_model(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    written, built_in = resolve_model(str(write_config(tmp_path / "m", config))), resolve_model(name)
    texts = [read_config(spec).get_text_config() for spec in (written, built_in)]
    for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size", "layer_types"):
        assert getattr(texts[0], key, None) == getattr(texts[1], key, None), key
    assert max_positions(written) == max_positions(built_in)
    assert image_tokens(written, (560, 560)) == image_tokens(built_in, (560, 560))
    assert model_kind(written) == "image-text-to-text"


def test_a_cached_hub_model_needs_no_connection(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, AssertionError("asked"))
    cache_config(cache, "someone/tiny", TINY)
    assert resolve_model("someone/tiny") == ModelSpec(name="someone/tiny", config=TINY)


def test_a_revision_is_read_from_the_hub_also_for_a_built_in_name(cache: Path) -> None:
    cache_config(cache, "Qwen/Qwen3-8B", {**TINY, "model_type": "qwen3"}, revision="old")
    assert resolve_model("qwen3-8b", revision="old").config["hidden_size"] == 64
    assert resolve_model("qwen3-8b").config["hidden_size"] == 4096


def test_a_hub_model_that_is_not_cached_is_fetched_by_its_config_alone(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def download(name: str, file: str, **options: Any) -> str:
        asked.append((name, file, options))
        return str(write_config(tmp_path / "fetched") / "config.json")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert resolve_model("someone/tiny", revision="v2").config == TINY
    assert asked == [("someone/tiny", "config.json", {"revision": "v2"})]


# What is refused.


def test_an_unknown_name_is_answered_with_near_ones_that_work(cache: Path) -> None:
    said = problem_of("llama-2-7bb")
    assert "not in the built-in list" in said and "fix   use llama-2-7b" in said
    assert resolve_model("llama-2-7b")
    assert "such as llama-2-7b" in problem_of("zzzzz")
    assert "MODEL is empty" in problem_of(" ")
    assert "no hub id" in problem_of("what is this")


def test_a_name_cut_short_is_answered_without_the_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **kwargs: pytest.fail("asked"))
    said = problem_of("Mistral-7B")
    assert "near  mistral-7b-v0.1, mistral-7b-v0.3" in said and "size or version" in said
    assert resolve_model("gpt2").name  # whole, though "gpt2" starts longer names elsewhere


def test_offline_says_what_works_without_a_connection(cache: Path) -> None:
    said = problem_of("unsloth/Llama-3.2-1B-Instruct")  # HF_HUB_OFFLINE is set for all tests
    assert "HF_HUB_OFFLINE" in said and "hf download unsloth/Llama-3.2-1B-Instruct config.json" in said
    assert "near  meta-llama/Llama-3.2-1B-Instruct" in said and "built-in list" in said


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (hub.GatedRepoError, 403, "accept the licence at https://huggingface.co/meta-llama/Llama-9-8B"),
        (hub.HfHubHTTPError, 403, "hf auth login"),
        (hub.RepositoryNotFoundError, 404, "not on the hub, or private"),
        (hub.RevisionNotFoundError, 404, "--revision nightly: meta-llama/Llama-9-8B has no such"),
        (hub.HfHubHTTPError, 503, "the hub answers 503"),
    ],
)
def test_every_answer_of_the_hub_is_explained(
    cache: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], status: int, words: str
) -> None:
    refuse(monkeypatch, http_error(error, status))
    said = problem_of("meta-llama/Llama-9-8B", revision="nightly")
    assert words in said
    if error is hub.GatedRepoError:
        assert "use meta-llama/Llama-3.1-8B of the built-in list" in said


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"adapter_config.json": '{"base_model_name_or_path": "Qwen/Qwen3-8B"}'}, "name its base model: Qwen/Qwen3-8B"),
        ({"model_index.json": "{}"}, "diffusers pipeline"),
        ({"model.gguf": ""}, "GGUF"),
    ],
)
def test_a_repository_without_a_config_says_what_it_is(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], words: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    def download(repository: str, file: str, **options: Any) -> str:
        if file not in files:
            raise http_error(hub.RemoteEntryNotFoundError, 404)
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    said = problem_of("someone/thing")
    assert "has no config.json" in said and words in said


def test_folders_that_are_no_model_say_what_they_are(tmp_path: Path) -> None:
    def folder(name: str, **files: str) -> str:
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / f"{file}.json").write_text(text)
        return str(tmp_path / name)

    base = '{"base_model_name_or_path": "meta-llama/Llama-2-7b-hf"}'
    assert "name its base model: meta-llama/Llama-2-7b-hf" in problem_of(folder("adapter", adapter_config=base))
    assert "name the model that it was trained on" in problem_of(folder("broken_adapter", adapter_config="{"))
    assert "diffusers" in problem_of(folder("pipeline", model_index="{}"))
    run = folder("run")
    write_config(tmp_path / "run" / "checkpoint-10")
    said = problem_of(run)
    assert f"fix   name {run}/checkpoint-10" in said and resolve_model(f"{run}/checkpoint-10")


def test_paths_that_are_not_there_or_no_config(tmp_path: Path) -> None:
    write_config(tmp_path / "model")
    said = problem_of(str(tmp_path / "modle"))
    assert "no such folder or file" in said and f"name {tmp_path / 'model'}" in said
    (tmp_path / "model" / "model.safetensors").write_bytes(b"x")
    said = problem_of(str(tmp_path / "model" / "model.safetensors"))
    assert f"name {tmp_path / 'model' / 'config.json'}" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_type": ', "cannot be read as JSON"),
        ("[1, 2]", "holds a list"),
        ("{}", "no model_type"),
        ('{"model_type": 7}', "model_type=7"),
        ("[" * 100_000, "cannot be read as JSON"),
    ],
)
def test_a_broken_config_is_named_with_its_file(tmp_path: Path, text: str, words: str) -> None:
    said = problem_of(str(write_config(tmp_path / "model", text)))
    assert words in said and "config.json" in said.split("from  ")[-1]


def test_an_unknown_model_type_names_both_versions(tmp_path: Path) -> None:
    import transformers

    said = problem_of(str(write_config(tmp_path / "m", model_type="lama", transformers_version="9.1.0")))
    assert transformers.__version__ in said and "9.1.0" in said and "near  llama" in said


def test_values_that_transformers_refuses_are_reported_in_words(tmp_path: Path) -> None:
    said = problem_of(str(write_config(tmp_path / "m", hidden_size="wide")))
    assert "transformers refuses its config.json" in said and "hidden_size" in said


@pytest.mark.parametrize(
    ("model_type", "architecture", "words"),
    [
        ("t5", "T5ForConditionalGeneration", "encoder-decoder"),
        ("bert", "BertForMaskedLM", "masked words"),
        ("whisper", "WhisperForConditionalGeneration", "speech"),
        ("vit", "ViTForImageClassification", "no language model"),
    ],
)
def test_models_of_other_kinds_are_refused(tmp_path: Path, model_type: str, architecture: str, words: str) -> None:
    config = {"model_type": model_type, "architectures": [architecture]}
    assert words in problem_of(str(write_config(tmp_path / "m", config)))


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "causal-lm"),
        ({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}, "image-text-to-text"),
        ({"model_type": "gemma3_text"}, "causal-lm"),
        ({"model_type": "mllama"}, "image-text-to-text"),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, "causal-lm"),
        ({"model_type": "bert", "architectures": ["BertForPreTraining"]}, "masked-lm"),
        ({"model_type": "t5"}, "seq2seq"),
    ],
)
def test_the_kind_is_the_class_that_is_built(config: dict[str, Any], kind: str) -> None:
    assert model_kind(ModelSpec(name="x", config=config)) == kind


# Quantized checkpoints.


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "compressed-tensors", "mxfp4"])
def test_other_quantizers_are_refused_with_the_base_named(cache: Path, method: str) -> None:
    ending = {"gptq": "GPTQ-Int4", "awq": "AWQ", "fp8": "FP8"}.get(method, "4bit")
    name = f"Qwen/Qwen2.5-7B-Instruct-{ending}"
    cache_config(cache, name, {**TINY, "model_type": "qwen2", "quantization_config": {"quant_method": method}})
    for how in ("full", "qlora"):
        said = problem_of(name, method=how)
        assert f"quantized by {method}" in said and "name Qwen/Qwen2.5-7B-Instruct" in said


def test_four_bit_checkpoints_are_for_qlora(cache: Path) -> None:
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    cache_config(cache, "unsloth/Qwen3-8B-unsloth-bnb-4bit", {**TINY, "quantization_config": settings})
    said = problem_of("unsloth/Qwen3-8B-unsloth-bnb-4bit", method="lora")
    assert "--method lora cannot train" in said and "fix   --method qlora" in said and "Qwen/Qwen3-8B" in said
    assert resolve_model("unsloth/Qwen3-8B-unsloth-bnb-4bit", method="qlora").config == TINY


def test_eight_bits_are_refused_for_every_method(tmp_path: Path) -> None:
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    folder = write_config(tmp_path / "m", quantization_config=settings)
    assert "bitsandbytes in 8 bits" in problem_of(str(folder), method="qlora")


def test_all_problems_of_a_config_are_told_at_once(tmp_path: Path) -> None:
    settings = {"quant_method": "awq"}
    folder = write_config(tmp_path / "m", model_type="t5", d_model="wide", quantization_config=settings)
    with pytest.raises(PlanError, match="3 problems") as raised:
        resolve_model(str(folder))
    assert all(problem.source == str(folder / "config.json") for problem in raised.value.problems)
