"""The config.json of a model on the hub: that one file, from the cache first, and what it means when it is refused."""

from __future__ import annotations

from pathlib import Path

from hf_fsdp.errors import PlanError, Problem
from hf_fsdp.plan.models.known_models import near_known_models
from hf_fsdp.plan.models.local_config import base_of_adapter

_OFFLINE = "a name of the built-in list, a folder or a config.json works without the hub"
# What a repository holds instead of a config.json -> what it is.
_OTHER_KINDS = {
    "adapter_config.json": "a LoRA adapter",
    "model_index.json": "a diffusers pipeline",
}


def find_hub_config(name: str, *, revision: str | None = None) -> Path:
    """Return the path of a repository's config.json in the local cache, downloading that one file if it is not there.

    Args:
        name: a hub id; one without an owner is tried too.
        revision: branch, tag or commit; None is ``main``.

    Raises:
        PlanError: gated, private, missing, unreachable, or a repository without a config.json.
    """
    import huggingface_hub
    from huggingface_hub import errors as hub

    try:
        cached = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        return Path(huggingface_hub.hf_hub_download(name, "config.json", revision=revision))
    except hub.HFValidationError:
        raise _unknown_name(name, "no hub id (owner/name)") from None
    except hub.GatedRepoError as error:  # before RepositoryNotFoundError, which it inherits from
        raise PlanError(_gated(name)) from error
    except hub.RepositoryNotFoundError as error:
        raise _unknown_name(name, "not on the hub, or private (then run: hf auth login)") from error
    except hub.RevisionNotFoundError as error:
        raise PlanError(
            f"--revision {revision}: {name} has no such branch, tag or commit",
            fix=f"see https://huggingface.co/{name}/tree/main, or leave --revision out",
        ) from error
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled) as error:
        if "/" not in name:
            raise _unknown_name(name, "not in the hub's local cache; the hub cannot be reached") from error
        raise PlanError(_unreachable(name, "the hub cannot be reached, or HF_HUB_OFFLINE is set")) from error
    except hub.EntryNotFoundError as error:
        raise PlanError(_without_config(name, revision)) from error
    except hub.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise PlanError(_gated(name)) from error
        raise PlanError(_unreachable(name, f"the hub answers {status}")) from error


def _unknown_name(name: str, on_hub: str) -> PlanError:
    near = near_known_models(name)
    return PlanError(
        f"MODEL {name!r} is not in the built-in list, no folder here, and {on_hub}",
        near=", ".join(near) or None,
        fix=f"use {near[0]}" if near else "a name such as llama-2-7b, a folder with a config.json, or a hub id",
    )


def _gated(name: str) -> Problem:
    near = near_known_models(name, limit=1)
    same = f"; or, if it is of that shape, use {near[0]} of the built-in list, which needs no hub" if near else ""
    return Problem(
        message=f"MODEL {name!r} is gated or private, and this account may not read its config.json",
        near=", ".join(near_known_models(name)) or None,
        fix=f"accept the licence at https://huggingface.co/{name}, then run: hf auth login{same}",
    )


def _unreachable(name: str, why: str) -> Problem:
    near = near_known_models(name)
    return Problem(
        message=f"MODEL {name!r} is not in the built-in list nor in the local cache, and {why}",
        near=", ".join(near) or None,
        fix=f"with a connection run: hf download {name} config.json; {_OFFLINE}",
    )


def _without_config(name: str, revision: str | None) -> Problem:
    """Look once more, for what the repository is instead."""
    import huggingface_hub
    from huggingface_hub import errors as hub

    kind, base = "weights of another format (GGUF), or no model", None
    for file, words in _OTHER_KINDS.items():
        try:
            path = Path(huggingface_hub.hf_hub_download(name, file, revision=revision))
        except (hub.HfHubHTTPError, hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled):
            continue
        kind, base = words, base_of_adapter(path.parent) if file == "adapter_config.json" else None
        break
    fix = f"name the model that it was made from; see https://huggingface.co/{name}"
    if kind == _OTHER_KINDS["model_index.json"]:
        fix = "name a language model: the planner simulates those that answer in words"
    return Problem(
        message=f"MODEL {name!r} has no config.json: {kind}", fix=f"name its base model: {base}" if base else fix
    )
