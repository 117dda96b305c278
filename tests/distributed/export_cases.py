"""Checkpoints of tiny models, exported and loaded again as others would load them."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from hf_fsdp import FSDPConfig, apply_fsdp
from hf_fsdp.checkpoint.export import ExportOptions, export_checkpoint
from hf_fsdp.checkpoint.save import SaveRequest, save_checkpoint
from hf_fsdp.errors import HfFsdpError
from hf_fsdp.storage.tensor_source import hf_folder_source, read_whole
from tests.distributed.tiny_models import VOCABULARY, build_model

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_LORA = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
# What is merged -> family, whether embeddings are tied, LoRA config.
MERGES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "plain": ("llama", False, {"target_modules": ["q_proj", "v_proj"]}),
    "rslora, head trained": (
        "llama",
        False,
        {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "modules_to_save": ["lm_head"]},
    ),
    "tied, head trained": ("llama", True, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tied, embeddings trained": ("llama", True, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "transposed, with biases": (
        "gpt2",
        True,
        {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "lora_only"},
    ),
    "dora": ("llama", False, {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True}),
    "embeddings, patterns": (
        "llama",
        False,
        {
            "target_modules": ["q_proj", "embed_tokens"],
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"q_proj": 3},
        },
    ),
    "lora bias": ("opt", False, {"target_modules": ["q_proj"], "lora_bias": True}),
    "tokens of tied embeddings": ("llama", True, {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]}),
}


def save(model: Any, folder: Path, step: int = 1, optimizer: Any = None) -> Path:
    """Save a checkpoint with the configs that Trainer's seam puts beside the weights."""

    def write_extras(staging: Path) -> None:
        if hasattr(model, "peft_config"):
            for name, config in model.peft_config.items():
                config.save_pretrained(staging if name == "default" else staging / name)
        else:
            architectures, model.config.architectures = model.config.architectures, [plain_class(model)]
            model.config.save_pretrained(staging)
            model.config.architectures = architectures
            model.generation_config.save_pretrained(staging)
        (staging / "tokenizer_config.json").write_text('{"model_max_length": 64}')

    request = SaveRequest(output_dir=folder, step=step, model=model, optimizer=optimizer, write_extras=write_extras)
    return save_checkpoint(request).path


def plain_class(model: Any) -> str:
    return type(model).__name__.removeprefix("FSDP")


def load(folder: Path, kind: Any = AutoModelForCausalLM) -> Any:
    """Load as anybody would; a tensor that is missing, new or of another shape fails."""
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


def differing(first: Any, second: Any) -> list[str]:
    """Return the names of tensors that are not equal to the bit, or only in one of two state dicts."""
    return sorted(
        name
        for name in {*first, *second}
        if name not in first
        or name not in second
        or first[name].dtype != second[name].dtype
        or not torch.equal(first[name], second[name])
    )


def shuffle(model: Any, seed: int = 1) -> None:
    """Give every trained parameter values that show; the same on every rank."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.normal_(mean=1.0 if "magnitude" in name else 0.0, std=0.1)


def refused(action: Any, *arguments: Any) -> str:
    try:
        action(*arguments)
    except HfFsdpError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder that all ranks see, and that is gone afterwards."""
    names = [tempfile.mkdtemp(prefix="hf-fsdp-export-") if not dist.is_initialized() or dist.get_rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(names)
    assert names[0] is not None
    try:
        yield Path(names[0])
    finally:
        if dist.is_initialized():
            dist.barrier()
        if not dist.is_initialized() or dist.get_rank() == 0:
            import shutil

            shutil.rmtree(names[0])


def quiet() -> Any:
    return contextlib.redirect_stderr(io.StringIO())


# -- sharded ----------------------------------------------------------------------------------------------------------


def masters(rank: int, world_size: int) -> dict[str, Any]:
    """A bf16 model that trains in fp32: its export is what `save_pretrained` gathers, tied or not."""
    found = {}
    for tied in (False, True):
        with shared_folder() as folder:
            model = build_model("llama", tied=tied, dtype=torch.bfloat16)
            apply_fsdp(model, FSDPConfig(precision="bf16-mixed"))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            batch = torch.arange(16).reshape(2, 8) + 3
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            checkpoint = save(model, folder / "run", optimizer=optimizer)
            model.save_pretrained(folder / "reference")
            entry: dict[str, Any] = {
                "sharded": all(isinstance(parameter, DTensor) for parameter in model.parameters()),
                "share": sum(p.to_local().numel() for p in model.parameters())
                / sum(p.numel() for p in model.parameters()),
                "stored": str(next(model.parameters()).dtype),
            }
            if rank == 0:
                with quiet():
                    out = folder / "out"
                    report = export_checkpoint(checkpoint, out, ExportOptions(max_shard_size="30KB"))
                    reference = load(folder / "reference").state_dict()
                    entry["report"] = [report.kind, report.dtype, report.num_tensors]
                    entry["files"] = sorted(path.name for path in out.iterdir())
                    entry["index"] = len(set(read_json(out / "model.safetensors.index.json")["weight_map"].values()))
                    entry["sizes"] = [path.stat().st_size for path in out.glob("*.safetensors")]
                    entry["config_dtype"] = read_json(out / "config.json")["dtype"]
                    entry["differing"] = differing(load(out).state_dict(), reference)
                    entry["aliases"] = sorted(
                        set(load(out).state_dict()) - set(hf_folder_source(out).tensors),
                    )
                    export_checkpoint(checkpoint, folder / "fp32", ExportOptions(dtype="saved"))
                    source = hf_folder_source(folder / "fp32")
                    entry["fp32_rounds_to_it"] = differing(
                        {name: read_whole(source, name).bfloat16() for name in source.tensors},
                        {name: value for name, value in reference.items() if name in source.tensors},
                    )
                    entry["fp32_is_more"] = any(
                        not torch.equal(read_whole(source, name), read_whole(source, name).bfloat16().float())
                        for name in source.tensors
                    )
            found["tied" if tied else "untied"] = entry
    return found


def sharded_adapter(rank: int, world_size: int) -> dict[str, Any]:
    """LoRA trained on shards: the adapter loads in PEFT to the bit, and merged it is what PEFT merges."""
    with shared_folder() as folder:
        if rank == 0:
            build_model("llama", tied=True).save_pretrained(folder / "base")
        dist.barrier()
        with quiet():
            base = AutoModelForCausalLM.from_pretrained(folder / "base")
        model = get_peft_model(base, LoraConfig(**_LORA, target_modules=["q_proj", "v_proj"]))
        shuffle(model)
        apply_fsdp(model, FSDPConfig(precision="fp32"))
        checkpoint = save(model, folder / "run", optimizer=torch.optim.AdamW(model.parameters()))
        whole = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in model.state_dict().items()
        }
        entry: dict[str, Any] = {"sharded": all(isinstance(p, DTensor) for p in model.parameters())}
        if rank == 0:
            with quiet():
                report = export_checkpoint(checkpoint, folder / "adapter")
                entry["report"] = [report.kind, report.dtype, list(report.files)]
                again = PeftModel.from_pretrained(
                    AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "adapter"
                )
                entry["differing"] = differing(again.state_dict(), whole)
                report = export_checkpoint(checkpoint, folder / "merged", ExportOptions(merge_lora=True))
                entry["merged"] = [report.kind, list(report.lines)]
                entry["merged_differing"] = differing(
                    load(folder / "merged").state_dict(), again.merge_and_unload().state_dict()
                )
        return entry


# -- in one process ---------------------------------------------------------------------------------------------------


def merges(rank: int, world_size: int) -> dict[str, Any]:
    """Every kind of LoRA, merged on fp32 and bf16 bases, against PEFT's own merge: errors in ulps."""
    return {
        f"{name}, {dtype}": _merge(family, tied, lora, dtype)
        for name, (family, tied, lora) in MERGES.items()
        for dtype in (torch.float32, torch.bfloat16)
    }


def _merge(family: str, tied: bool, lora: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    with shared_folder() as folder, quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = build_model(family, tied=tied, dtype=dtype)
        base.save_pretrained(folder / "base")
        base.name_or_path = str(folder / "base")
        before = {name: value.clone() for name, value in base.state_dict().items()}
        model = get_peft_model(base, LoraConfig(**_LORA, **lora))
        shuffle(model)
        checkpoint = save(model, folder / "run")
        report = export_checkpoint(
            checkpoint, folder / "merged", ExportOptions(merge_lora=True, max_shard_size="30KB", base=folder / "base")
        )
        export_checkpoint(checkpoint, folder / "adapter")
        again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "adapter")
        adapter = differing(again.state_dict(), model.state_dict())
        found = load(folder / "merged").state_dict()
        expected = model.merge_and_unload().state_dict()
    assert set(found) == set(expected)
    worst, changed = 0.0, 0
    for name, value in expected.items():
        assert found[name].dtype == value.dtype == dtype
        changed += int(name in before and not torch.equal(value, before[name]))
        # Of what was added: where both cancel, PEFT's own rounding of an embedding's delta is all that is left.
        largest = torch.maximum(value.float().abs(), before[name].float().abs()) if name in before else value.float()
        ulp = largest.abs() * torch.finfo(dtype).eps + 1e-30
        worst = max(worst, float(((found[name].float() - value.float()).abs() / ulp).max()))
    return {"worst": worst, "changed": changed, "adapter": adapter, "lines": list(report.lines), "dtype": report.dtype}


def renamed_families(rank: int, world_size: int) -> dict[str, Any]:
    """Families whose weights transformers renames, cuts or ties when it saves: files equal to `save_pretrained`'s."""
    found = {}
    for model in _build_families():
        with shared_folder() as folder, quiet():
            name = type(model).__name__
            shuffle(model)
            model = model.to(torch.bfloat16)
            report = export_checkpoint(save(model, folder / "run"), folder / "out", ExportOptions(max_shard_size="9KB"))
            model.save_pretrained(folder / "reference")
            ours, theirs = hf_folder_source(folder / "out"), hf_folder_source(folder / "reference")
            again = load(folder / "out", getattr(transformers, name))
            found[name] = {
                "names": sorted(set(ours.tensors) ^ set(theirs.tensors)),
                "renamed": len(set(ours.tensors) - set(model.state_dict())),
                "files": differing(
                    {key: read_whole(ours, key) for key in ours.tensors},
                    {key: read_whole(theirs, key) for key in theirs.tensors},
                ),
                # DeepSeek's class keeps some of its tensors in float32 when it is loaded.
                "differing": differing(again.to(torch.bfloat16).state_dict(), model.state_dict()),
                "lines": list(report.lines),
            }
            if name == "MixtralForCausalLM":
                found[name]["merged"] = _merge_renamed(folder)
    return found


def _build_families() -> list[Any]:
    torch.manual_seed(0)
    text = transformers.LlamaConfig(**_SIZES)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    t5 = transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4)
    return [
        transformers.MixtralForCausalLM(transformers.MixtralConfig(**_SIZES, num_local_experts=4)),
        transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=60)
        ),
        transformers.T5ForConditionalGeneration(t5),
        transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**_SIZES, n_routed_experts=4)),
    ]


def _merge_renamed(folder: Path) -> list[str]:
    """LoRA on the attention of a model whose experts lie in many files' tensors: those are passed on as they are."""
    base = AutoModelForCausalLM.from_pretrained(folder / "reference")
    model = get_peft_model(base, LoraConfig(**_LORA, target_modules=["q_proj"]))
    shuffle(model)
    export_checkpoint(save(model, folder / "lora"), folder / "merged", ExportOptions(merge_lora=True))
    return differing(load(folder / "merged").state_dict(), model.merge_and_unload().state_dict())


def several_adapters(rank: int, world_size: int) -> dict[str, Any]:
    """Two adapters: each in its folder; merged, the default one."""
    with shared_folder() as folder, quiet():
        build_model("llama", tied=False).save_pretrained(folder / "base")
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(folder / "base"), LoraConfig(**_LORA, target_modules=["q_proj"])
        )
        model.add_adapter("other", LoraConfig(**_LORA, target_modules=["v_proj"]))
        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.1)
        checkpoint = save(model, folder / "run")
        report = export_checkpoint(checkpoint, folder / "out", ExportOptions(dtype="bf16"))
        again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "out")
        again.load_adapter(folder / "out" / "other", adapter_name="other")
        rounded = {
            name: value.bfloat16().float() if "lora_" in name else value.clone()
            for name, value in model.state_dict().items()
        }
        merged = export_checkpoint(checkpoint, folder / "merged", ExportOptions(merge_lora=True))
        model.set_adapter("default")
        expected = model.merge_and_unload(adapter_names=["default"]).state_dict()
        return {
            "files": list(report.files),
            "dtype": report.dtype,
            "differing": differing(again.state_dict(), rounded),
            "lines": list(merged.lines),
            "merged": differing(load(folder / "merged").state_dict(), expected),
        }


def refusals(rank: int, world_size: int) -> dict[str, Any]:
    """Everything that must not end in a folder, and what its fix does."""
    found: dict[str, Any] = {}
    with shared_folder() as folder, quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build_model("llama", tied=False)
        run, out = folder / "run", folder / "out"
        checkpoint = save(model, run)
        export_checkpoint(checkpoint, out)
        before = sorted((path.name, path.stat().st_mtime_ns) for path in out.iterdir())
        found["exists"] = refused(export_checkpoint, checkpoint, out)
        found["untouched"] = before == sorted((path.name, path.stat().st_mtime_ns) for path in out.iterdir())
        export_checkpoint(checkpoint, out, ExportOptions(force=True, dtype="bf16"))
        found["forced"] = str(load(out).dtype)
        (folder / "mine").mkdir()
        (folder / "mine" / "thesis.txt").write_text("text")
        found["no_export"] = refused(export_checkpoint, checkpoint, folder / "mine", ExportOptions(force=True))
        found["the_run"] = refused(export_checkpoint, checkpoint, run, ExportOptions(force=True))
        found["inside"] = refused(export_checkpoint, checkpoint, checkpoint / "out")
        found["dtype"] = refused(export_checkpoint, checkpoint, folder / "x", ExportOptions(dtype="int8"))
        found["size"] = refused(export_checkpoint, checkpoint, folder / "x", ExportOptions(max_shard_size="many"))
        found["no_adapter"] = refused(export_checkpoint, checkpoint, folder / "x", ExportOptions(merge_lora=True))
        with torch.no_grad():
            model.model.norm.weight[3] = 70000.0
        found["overflow"] = refused(
            export_checkpoint, save(model, run, step=2), folder / "x", ExportOptions(dtype="fp16")
        )
        model.config.vocab_size += 8
        found["other_config"] = refused(export_checkpoint, save(model, run, step=3), folder / "x")
        found["lora"] = _refused_merges(folder)
        found["left"] = sorted(path.name for path in folder.iterdir())
    return found


def _refused_merges(folder: Path) -> dict[str, str]:
    found = {}
    kinds: dict[str, tuple[bool, dict[str, Any]]] = {
        "tied": (True, {"target_modules": ["embed_tokens"]}),
        "pissa": (False, {"target_modules": ["q_proj"], "init_lora_weights": "pissa"}),
        "parameters": (False, {"target_modules": ["q_proj"], "target_parameters": ["mlp.up_proj.weight"]}),
    }
    for name, (tied, lora) in kinds.items():
        base = build_model("llama", tied=tied)
        base.save_pretrained(folder / "base")
        model = get_peft_model(base, LoraConfig(**_LORA, **lora))
        options = ExportOptions(merge_lora=True, base=folder / "base")
        found[name] = refused(export_checkpoint, save(model, folder / "lora"), folder / "x", options)
    model = get_peft_model(build_model("llama", tied=False), LoraConfig(**_LORA, target_modules=["q_proj"]))
    norm = model.base_model.model.model.norm.weight.requires_grad_(True)
    optimizer = torch.optim.AdamW([norm])
    norm.sum().backward()
    optimizer.step()
    checkpoint = save(model, folder / "lora", step=2, optimizer=optimizer)
    found["trained outside"] = refused(export_checkpoint, checkpoint, folder / "x")
    options = ExportOptions(merge_lora=True, base=folder / "nowhere")
    found["no base"] = refused(export_checkpoint, checkpoint, folder / "x", options)
    options = ExportOptions(merge_lora=True, base="nobody/nothing")
    found["not on the hub"] = refused(export_checkpoint, checkpoint, folder / "x", options)
    build_model("llama", tied=False).save_pretrained(folder / "base")
    export_checkpoint(checkpoint, folder / "fixed", ExportOptions(merge_lora=True, base=folder / "base"))
    found["fixed"] = str(torch.equal(load(folder / "fixed").model.norm.weight, norm))
    return found


def resized(rank: int, world_size: int) -> dict[str, Any]:
    """Tokens were added, so PEFT saves embeddings whole, some of them under two names: reloaded and merged."""
    found = {}
    for tied in (False, True):
        for trained in ([], ["embed_tokens", "lm_head"]):
            with shared_folder() as folder, quiet(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                build_model("llama", tied=tied).save_pretrained(folder / "base")
                base, twin = (AutoModelForCausalLM.from_pretrained(folder / "base") for _ in range(2))
                for model in (base, twin):
                    model.resize_token_embeddings(VOCABULARY + 5)
                lora = LoraConfig(**_LORA, target_modules=["q_proj"], modules_to_save=trained or None)
                model = get_peft_model(base, lora)
                shuffle(model)
                checkpoint = save(model, folder / "run")
                export_checkpoint(checkpoint, folder / "adapter")
                again = PeftModel.from_pretrained(twin, folder / "adapter")
                export_checkpoint(checkpoint, folder / "merged", ExportOptions(merge_lora=True))
                found[f"tied {tied}, trained {len(trained)}"] = {
                    "adapter": differing(again.state_dict(), model.state_dict()),
                    "merged": differing(load(folder / "merged").state_dict(), model.merge_and_unload().state_dict()),
                    "vocabulary": read_json(folder / "merged" / "config.json")["vocab_size"],
                }
    return found


def other_base(rank: int, world_size: int) -> dict[str, Any]:
    """The base is told from another one by the fingerprint that the checkpoint carries."""
    with shared_folder() as folder, quiet():
        found: dict[str, Any] = {}
        for dtype in (torch.float32, torch.bfloat16):
            base = build_model("llama", tied=True, dtype=dtype)
            base.save_pretrained(folder / "base")
            with torch.no_grad():
                other = build_model("llama", tied=True, dtype=dtype)
                other.model.norm.weight[0] += 1
            other.save_pretrained(folder / "other")
            model = get_peft_model(base, LoraConfig(**_LORA, target_modules=["q_proj"]))
            checkpoint = save(model, folder / "run")
            for name in ("base", "other"):
                options = ExportOptions(merge_lora=True, base=folder / name, force=True)
                lines = export_checkpoint(checkpoint, folder / "out", options).lines
                found[f"{name} {dtype}"] = [line for line in lines if "not those" in line]
        return found


def damage(rank: int, world_size: int) -> dict[str, Any]:
    """A flipped byte anywhere that is exported, a lost file, a checkpoint that was not committed."""
    found: dict[str, Any] = {}
    with shared_folder() as folder, quiet():
        model = build_model("llama", tied=False)
        optimizer = torch.optim.AdamW(model.parameters())
        model(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
        optimizer.step()
        checkpoint = save(model, folder / "run", optimizer=optimizer)
        path = checkpoint / "config.json"
        data = path.read_bytes()
        path.write_bytes(data.replace(b'"silu"', b'"relu"'))  # still a config, of the same size
        found["flipped .json"] = refused(export_checkpoint, checkpoint, folder / "out")
        path.write_bytes(data)
        path = next((checkpoint / "model").iterdir())
        data = path.read_bytes()
        path.write_bytes(data[:-40] + bytes([data[-40] ^ 1]) + data[-39:])
        found["flipped .safetensors"] = refused(export_checkpoint, checkpoint, folder / "out")
        path.write_bytes(data[:-100])
        found["cut off"] = refused(export_checkpoint, checkpoint, folder / "out")
        path.write_bytes(data)
        next((checkpoint / "optimizer").glob("*.safetensors")).unlink()
        found["without optimizer"] = export_checkpoint(checkpoint, folder / "good").num_tensors
        (checkpoint / "manifest.json").unlink()
        found["uncommitted"] = refused(export_checkpoint, checkpoint, folder / "out")
        found["no run"] = refused(export_checkpoint, folder / "nothing", folder / "out")
        found["left"] = sorted(path.name for path in folder.iterdir())
    return found


def killed(rank: int, world_size: int) -> dict[str, Any]:
    """An export that is killed while it writes leaves no OUT, and the next one removes what it left."""
    with shared_folder() as folder, quiet():
        model = build_model("llama", tied=False)
        checkpoint = save(model, folder / "run")
        code = (
            "import sys, time; from pathlib import Path; from hf_fsdp.checkpoint import export as e\n"
            "def slow(done, total): print('writing', flush=True); time.sleep(60)\n"
            f"e.export_checkpoint(Path({str(checkpoint)!r}), Path({str(folder / 'out')!r}), None, slow)"
        )
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=os.getcwd()) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"writing\n"
            os.kill(process.pid, signal.SIGKILL)
        left = [path.name for path in folder.iterdir()]
        export_checkpoint(checkpoint, folder / "out")
        return {
            "out_was_there": "out" in left,
            "staged": [name for name in left if "exporting" in name],
            "after": sorted(path.name for path in folder.iterdir()),
            "differing": differing(load(folder / "out").state_dict(), model.state_dict()),
        }


def foreign(rank: int, world_size: int) -> dict[str, Any]:
    """What Trainer and Accelerate write: whole weights beside a config, and DCP's shards with a base for the config."""
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint import save as save_dcp

    found: dict[str, Any] = {}
    with shared_folder() as folder, quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build_model("llama", tied=True)
        plain = folder / "checkpoint-5"
        model.save_pretrained(plain)
        (plain / "trainer_state.json").write_text("{}")
        report = export_checkpoint(plain, folder / "plain", ExportOptions(dtype="bf16"))
        found["plain"] = [*report.lines, *report.files]
        rounded = {name: value.bfloat16() for name, value in model.state_dict().items()}
        found["plain_differing"] = differing(load(folder / "plain").state_dict(), rounded)
        shards = folder / "checkpoint-6"
        save_dcp({"model": model.state_dict()}, storage_writer=FileSystemWriter(shards / "pytorch_model_fsdp_0"))
        (shards / "trainer_state.json").write_text("{}")
        found["no_config"] = refused(export_checkpoint, shards, folder / "shards")
        export_checkpoint(shards, folder / "shards", ExportOptions(base=plain))
        adapted = get_peft_model(build_model("llama", tied=True), LoraConfig(**_LORA, target_modules=["q_proj"]))
        adapter = folder / "checkpoint-7"
        save_dcp({"model": adapted.state_dict()}, storage_writer=FileSystemWriter(adapter / "pytorch_model_fsdp_0"))
        (adapter / "trainer_state.json").write_text("{}")
        found["peft_shards"] = refused(export_checkpoint, adapter, folder / "x", ExportOptions(base=plain))
        found["shards_differing"] = differing(load(folder / "shards").state_dict(), model.state_dict())
    return found


def ties_of_users(rank: int, world_size: int) -> dict[str, Any]:
    """Tensors that only the training script tied are written under both names; tied ones that came apart, too."""
    with shared_folder() as folder, quiet():
        model = build_model("llama", tied=False)
        model.lm_head.weight = model.model.embed_tokens.weight
        export_checkpoint(save(model, folder / "run"), folder / "tied_by_hand")
        by_hand = load(folder / "tied_by_hand")
        model = build_model("llama", tied=True)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
        report = export_checkpoint(save(model, folder / "run", step=2), folder / "apart")
        apart = load(folder / "apart")
        return {
            "by_hand": torch.equal(by_hand.lm_head.weight, by_hand.model.embed_tokens.weight),
            "apart": differing(apart.state_dict(), model.state_dict()),
            "lines": list(report.lines),
        }


def four_bit(rank: int, world_size: int) -> dict[str, Any]:
    """An adapter of a 4-bit base goes onto the full weights, and the report says so."""
    from tests.distributed.qlora_models import add_lora, load_base, saved_base

    with shared_folder() as folder, quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = add_lora(load_base(torch.float32))
        shuffle(model)
        checkpoint = save(model, folder / "run")
        options = ExportOptions(merge_lora=True, base=saved_base())
        report = export_checkpoint(checkpoint, folder / "out", options)
        export_checkpoint(checkpoint, folder / "adapter")
        twin = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(saved_base()), folder / "adapter")
        return {
            "lines": list(report.lines),
            "differing": differing(load(folder / "out").state_dict(), twin.merge_and_unload().state_dict()),
            "quantized": "quantization_config" in read_json(folder / "out" / "config.json"),
        }


def memory(rank: int, world_size: int) -> dict[str, Any]:
    """Exporting a model of 0.4 GB takes memory for its largest tensor, not for the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with shared_folder() as folder, quiet():
        config = LlamaConfig(
            vocab_size=4000,
            hidden_size=512,
            intermediate_size=2048,
            num_hidden_layers=24,
            num_attention_heads=8,
            num_key_value_heads=8,
        )
        model = LlamaForCausalLM(config)
        checkpoint = save(model, folder / "run")
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        largest = max(p.numel() * p.element_size() for p in model.parameters())
        del model
        code = (
            "import re, threading; from pathlib import Path; from hf_fsdp.checkpoint import export as e\n"
            "import transformers; transformers.LlamaForCausalLM\n"
            "read = lambda: int(re.search(r'RssAnon:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]) * 1024\n"
            "before = read(); peak = [before]\n"
            "def look(done, total): peak[0] = max(peak[0], read())\n"
            f"e.export_checkpoint(Path({str(checkpoint)!r}), Path({str(folder / 'out')!r}), None, look)\n"
            "print(peak[0] - before, peak[0])"
        )
        started = time.monotonic()
        output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        grown, peak = (int(number) for number in output.split())
        return {
            "grown": grown,
            "peak": peak,
            "model": num_bytes,
            "largest": largest,
            "seconds": time.monotonic() - started,
        }


def read_json(path: Path) -> Any:
    import json

    return json.loads(path.read_text())


CASES = {
    case.__name__: case
    for case in (
        masters,
        sharded_adapter,
        merges,
        renamed_families,
        several_adapters,
        refusals,
        resized,
        other_base,
        damage,
        killed,
        foreign,
        ties_of_users,
        four_bit,
        memory,
    )
}
