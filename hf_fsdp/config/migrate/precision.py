"""What the old config says about dtypes: a word such as ``bf16``, or the dtypes of a `MixedPrecision`."""

from __future__ import annotations

from hf_fsdp.config.migrate.draft import Draft
from hf_fsdp.config.migrate.setting import OldSetting
from hf_fsdp.config.values import DTYPE_ALIASES, FALSE_WORDS, TRUE_WORDS, word_of

MIXED_PRESETS = {"bfloat16": "bf16-mixed", "float16": "fp16-mixed", "float32": "fp32"}
REDUCED_IN_FP32 = (
    "gradients were summed over the GPUs in {old}; hf-fsdp sums them in float32 unless you write "
    "precision: {{reduce_dtype: bfloat16}}"
)


def dtype_name(value: object) -> str:
    """Return ``bfloat16`` for ``torch.bfloat16``, ``bf16`` and the like; an unknown word as it is."""
    word = word_of(value).rpartition(".")[2]
    return {**DTYPE_ALIASES, "fp16": "float16", "half": "float16"}.get(word, word)


def read_precision(draft: Draft) -> None:
    """Read precision words, switches and dtypes; all of them must agree."""
    for setting in draft.take("mixed_precision"):
        _read_word(draft, setting)
    _read_switches(draft)
    _read_dtypes(draft)
    on, upcast = draft.take_bool("upcast_layernorm")
    if upcast is not None and on:
        draft.put("precision.keep_norms_fp32", True, upcast)
    if "precision.preset" not in draft.lines and draft.old.silent_precision is not None:
        preset, why = draft.old.silent_precision
        draft.put("precision.preset", preset, None, why)


def _read_word(draft: Draft, setting: OldSetting) -> None:
    word = word_of(setting.value)
    if word == "fp8":
        draft.refuse(setting, "fp8 is not built", fix=f"{setting.text.partition(':')[0]}: bf16")
        return
    draft.put("precision.preset", setting.value, setting)
    if word in ("bf16", "fp16"):
        draft.leave(setting, "changed", REDUCED_IN_FP32.format(old=dtype_name(word)))


def _read_switches(draft: Draft) -> None:
    """Read ``bf16: true``, ``fp16: true``, ``pure_bf16: true`` and Axolotl's ``bf16: auto | full``."""
    named = {"bf16": "bf16-mixed", "fp16": "fp16-mixed", "pure_bf16": "bf16-true"}
    all_off: list[OldSetting] = []
    for name, preset in named.items():
        for setting in draft.take(name):
            word = word_of(setting.value)
            if word == "full" and name != "pure_bf16":
                draft.put("precision.preset", "bf16-true" if name == "bf16" else "fp16-true", setting)
            elif word == "auto":
                draft.put("precision.preset", "auto", setting)
            elif word in TRUE_WORDS:
                draft.put("precision.preset", preset, setting)
            elif word in FALSE_WORDS:
                all_off.append(setting)
            else:
                draft.refuse(setting, "is neither true nor false", fix=f"{name}: true   # or false")
    if "precision.preset" not in draft.lines and draft.old.silent_precision is None:
        for setting in all_off:
            draft.put("precision.preset", "fp32", setting)


def _read_dtypes(draft: Draft) -> None:
    """Read `MixedPrecision` and `MixedPrecisionPolicy`, whose arguments are dtypes."""
    parameters, reduce = draft.take_one("param_dtype"), draft.take_one("reduce_dtype")
    if parameters is not None:
        name = dtype_name(parameters.value)
        if name not in MIXED_PRESETS:
            draft.refuse(parameters, "hf-fsdp computes in float32, bfloat16 or float16", fix="torch.bfloat16")
            return
        draft.put("precision.preset", MIXED_PRESETS[name], parameters)
        if reduce is None and name != "float32":
            draft.leave(parameters, "changed", REDUCED_IN_FP32.format(old=name))
    if reduce is not None:
        name = dtype_name(reduce.value)
        if name == "float16":
            draft.put("precision.reduce_dtype", "float32", reduce, "float16 sums overflow")
            draft.leave(reduce, "changed", "gradients are summed in float32: sums in float16 overflow")
        else:
            draft.put("precision.reduce_dtype", name, reduce)
    _read_other_dtypes(draft, parameters)


def _read_other_dtypes(draft: Draft, parameters: OldSetting | None) -> None:
    for setting in draft.take("buffer_dtype"):
        kind = "not needed" if dtype_name(setting.value) == "float32" else "no equivalent"
        draft.leave(setting, kind, "buffers keep the dtype they were loaded in")
    for setting in draft.take("output_dtype"):
        kind = "not needed" if dtype_name(setting.value) == "float32" else "no equivalent"
        draft.leave(setting, kind, "the model's outputs and its losses are float32")
    for name in ("cast_forward_inputs", "cast_root_forward_inputs"):
        on, switch = draft.take_bool(name)
        if switch is not None:
            why = "a unit's floating-point inputs are cast to what it computes in"
            draft.leave(switch, "not needed" if on else "no equivalent", why)
    for setting in draft.take("keep_low_precision_grads"):
        draft.leave(setting, "no equivalent", "gradients have the dtype of the stored parameters")
    for setting in draft.take("_module_classes_to_ignore"):
        why = "write precision: {keep_norms_fp32: true} to keep normalisation in float32; no other modules can be named"
        draft.leave(setting, "no equivalent", why)
