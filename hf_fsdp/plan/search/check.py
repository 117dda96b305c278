"""What in a request contradicts itself, before anything is simulated; every problem at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hf_fsdp.config.validate import check_config
from hf_fsdp.errors import PlanError, Problem, nearest_names
from hf_fsdp.plan.candidate import PlanRequest
from hf_fsdp.plan.job import Job
from hf_fsdp.plan.models.positions import check_sequence_length
from hf_fsdp.plan.search.divisions import check_division

METHODS = ("full", "lora", "qlora")
LOSSES = ("logits", "chunked")
ATTENTIONS = ("sdpa", "flash_attention_2", "eager")
LOAD_DTYPES = ("auto", "float32", "bfloat16")
# Those that `simulator/optimizer.py` knows; a name is refused here before a worker has started.
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "sgd", "adagrad", "rmsprop")

# In any currency; above it a cost is no figure that a table can show.
_MOST_AN_HOUR = 1e9


def check_request(request: PlanRequest) -> list[Problem]:
    """Return every problem of `request`: words that are not known, sizes that do not divide, contradicting options."""
    return [
        *_check_words(request),
        *_check_sizes(request),
        *_check_pictures(request),
        *_check_hardware(request),
        *_check_together(request),
    ]


def refuse(problems: Sequence[Problem]) -> None:
    """Raise `problems` together, if there are any.

    Raises:
        PlanError: with all of them.
    """
    if problems:
        raise PlanError(problems)


def _check_words(request: PlanRequest) -> Iterator[Problem]:
    for flag, value, known in (
        ("--method", request.method.name, METHODS),
        ("--loss", request.loss, LOSSES),
        ("--attention", request.attention, ATTENTIONS),
        ("--optim", request.optimizer, OPTIMIZERS),
        ("load_dtype", request.method.load_dtype, LOAD_DTYPES),
    ):
        if value not in known:
            near = nearest_names(value, known)
            yield Problem(
                message=f"{flag} {value} is not known", near=", ".join(known), fix=f"{flag} {(near or list(known))[0]}"
            )


def _check_sizes(request: PlanRequest) -> Iterator[Problem]:
    if request.max_length < 1:
        yield Problem(message=f"--max-length {request.max_length} leaves rows without a token", fix="--max-length 2048")
    elif request.model.config and (problem := check_sequence_length(request.model, request.max_length)):
        yield problem
    if request.num_gpus < 1:
        yield Problem(message=f"--gpus {request.num_gpus} is not a positive number of GPUs", fix="--gpus 8")
    elif problem := check_division(request.global_batch_size, request.num_gpus):
        yield problem
    if request.method.name != "full" and request.method.lora_r < 1:
        yield Problem(message=f"--lora-r {request.method.lora_r} leaves adapters without a rank", fix="--lora-r 16")
    if not 0 <= request.method.lora_dropout < 1:
        yield Problem(
            message=f"--lora-dropout {request.method.lora_dropout} is no probability below 1", fix="--lora-dropout 0.05"
        )
    yield from check_price(request.price_per_gpu_hour)
    if request.training_tokens is not None and request.training_tokens < 1:
        yield Problem(
            message=f"--tokens {request.training_tokens} is less than one", fix="--tokens 1000000, or leave it out"
        )


def check_price(price: float | None) -> Iterator[Problem]:
    """Yield what is wrong with a price per GPU and hour."""
    if price is not None and not 0 <= price <= _MOST_AN_HOUR:
        yield Problem(message=f"--price {price:g} an hour is no price", fix="--price 2.5, or leave it out")


def _check_pictures(request: PlanRequest) -> Iterator[Problem]:
    size = request.image_size
    if request.num_images < 0:
        yield Problem(message=f"--num-images {request.num_images} is below 0", fix="--num-images 0")
    elif size is not None and min(size) < 1:
        yield Problem(
            message=f"--image-size {size[0]}x{size[1]} has no pixels", fix="--image-size 448x448 (height x width)"
        )
    elif size is not None and not request.num_images:
        yield Problem(
            message=f"--image-size {size[0]}x{size[1]} without pictures", fix="--num-images 1, or leave it out"
        )
    elif request.num_images and request.max_length > 0 and request.model.config:
        from hf_fsdp.plan.search.structures import build_job

        try:
            picture_tokens(build_job(request, request.config, 1, 1))
        except PlanError as error:
            yield from error.problems


def picture_tokens(job: Job) -> int:
    """Return the tokens that pictures take in each row of `job`; 0 without pictures, or where no rule knows them.

    Raises:
        PlanError: the model takes none, it needs their size and there is none, or they do not fit in the row.
    """
    if not job.batch.num_images:
        return 0
    from hf_fsdp.plan.simulator.pictures import measure_picture  # imports torch

    picture = measure_picture(job)
    return 0 if picture is None else job.batch.num_images * picture.num_tokens


def _check_hardware(request: PlanRequest) -> Iterator[Problem]:
    gpu = request.gpus.gpu
    if gpu is not None and not gpu.has_bf16 and request.precision.startswith("bf16"):
        yield Problem(
            message=f"{gpu.name} does not compute in bfloat16, and precision is {request.precision}",
            fix="--precision fp16-mixed",
            source=request.config.sources.get("precision.preset"),
        )
    if request.num_gpus >= 1:
        yield from check_config(request.config, request.num_gpus)
    offload, sources = request.config.offload, request.config.sources
    if request.num_gpus == 1 and (offload.parameters or offload.activations != "none"):
        yield Problem(
            message="offload is set and there is one GPU: a single process trains unsharded, and nothing is offloaded",
            fix="offload: none, or --gpus 2",
            source=sources.get("offload.parameters") or sources.get("offload.activations"),
        )


def _check_together(request: PlanRequest) -> Iterator[Problem]:
    method = request.method
    if request.packing and request.padded:
        yield Problem(
            message="--packing fills every row and --padded says that rows differ in length", fix="keep one of them"
        )
    if request.packing and request.num_images > 0:
        yield Problem(
            message="--packing and pictures: rows with pictures are not packed",
            fix="leave out --packing, or --num-images 0",
        )
    if method.name == "full" and (method.lora_parts or method.lora_full):
        yield Problem(
            message="adapters are placed (lora_parts, lora_full) and --method is full: there are none",
            fix="--method lora, or leave them out",
        )
    if method.name != "full" and method.trainable:
        yield Problem(
            message=f"trainable={list(method.trainable)} freezes parts of a full fine-tuning, and --method is "
            f"{method.name}",
            fix=f"lora_full={list(method.trainable)}   # parts trained beside the adapters",
        )
    if method.name == "qlora" and method.load_dtype != "auto":
        yield Problem(
            message=f"--method qlora packs weights in 4 bits and load_dtype {method.load_dtype} says otherwise",
            fix="leave load_dtype out, or --method lora",
        )
    if method.name == "full" and request.precision == "fp32" and method.load_dtype == "bfloat16":
        yield Problem(
            message="precision fp32 and load_dtype bfloat16: weights would be rounded once and computed in float32",
            fix="load_dtype float32, or --precision bf16-mixed",
            source=request.config.sources.get("precision.preset"),
        )
