"""What a search left alone, in few words: whole groups where a group was left alone, single settings elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hf_fsdp.plan.candidate import PlanRequest
from hf_fsdp.plan.report.settings import describe_checkpointing, describe_offload, describe_sharding
from hf_fsdp.plan.search.structures import Structure, build_job, list_structures

_Key = tuple[str, str, str]


def describe_unexplored(
    request: PlanRequest, left_alone: Mapping[_Key, str], known: Collection[_Key] = ()
) -> dict[str, str]:
    """Return reason -> what was left alone for it.

    Args:
        request: what is planned; gives the structures that there are.
        left_alone: key of a structure -> why it was.
        known: structures about which arithmetic said enough; a group is whole without them.

    Example::

        describe_unexplored(request, {("sharded", "full", "parameters"): "since slower"})
        # {'since slower': 'offload of parameters+optimizer with checkpointing full'}
    """
    structures = list_structures(request)
    base = structures[0].offload
    told = {}
    for reason in dict.fromkeys(left_alone.values()):
        left = {key for key, why in left_alone.items() if why == reason}
        offloaded = [item for item in structures if item.offload != base]
        plain = [item for item in structures if item.offload == base]
        words = [_of_sharding(group, left, known, request) for group in _groups(plain, "sharding")]
        if offloaded and _is_whole(offloaded, left, known):
            words.append("offload of any kind")
        else:
            words += [_of_offload(group, left, known) for group in _groups(offloaded, "offload")]
        told[reason] = "; ".join(text for text in words if text)
    return told


def _groups(structures: Sequence[Structure], name: str) -> list[list[Structure]]:
    values = dict.fromkeys(getattr(item, name) for item in structures)
    return [[item for item in structures if getattr(item, name) == value] for value in values]


def _is_whole(group: Sequence[Structure], left: Collection[_Key], known: Collection[_Key]) -> bool:
    return any(item.key in left for item in group) and all(item.key in left or item.key in known for item in group)


def _of_sharding(
    group: Sequence[Structure], left: Collection[_Key], known: Collection[_Key], request: PlanRequest
) -> str:
    name = describe_sharding(build_job(request, group[0].config, 1, 1))
    return _named(name, group, left, known)


def _of_offload(group: Sequence[Structure], left: Collection[_Key], known: Collection[_Key]) -> str:
    name = f"offload of {describe_offload(group[0].config)}" if group[0].offload != "none" else "no offload"
    return _named(name, group, left, known)


def _named(name: str, group: Sequence[Structure], left: Collection[_Key], known: Collection[_Key]) -> str:
    """Return `name` alone where the whole group was left alone, else with the checkpointings that were."""
    found = [item for item in group if item.key in left]
    if not found:
        return ""
    if _is_whole(group, left, known):
        return name
    with_any = [item for item in group if item.checkpointing != "none"]
    if len(found) == len(with_any) > 1 and found == with_any:
        return f"{name} with checkpointing of any kind"
    if len(found) == len(group) - 1 > 1:
        (other,) = (item for item in group if item not in found)
        return f"{name} unless with checkpointing {_quoted(other)}"
    return f"{name} with checkpointing {' or '.join(_quoted(item) for item in found)}"


def _quoted(item: Structure) -> str:
    """Return the checkpointing, in quotes where a comma in it would end the list that it stands in."""
    words = describe_checkpointing(item.config)
    return f"'{words}'" if "," in words else words
