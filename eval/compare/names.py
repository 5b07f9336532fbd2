"""Names of all methods of decoding, and their needs."""

from collections.abc import Sequence

from conf.errors import InputError

VANILLA = "vanilla"
BASELINES = (VANILLA, "generate")
"""Methods without drafting. Both always run, and speed-ups are over the faster one."""
METHODS = {
    VANILLA: "the engine without drafts",
    "generate": "transformers' generate",
    "generate_lookup": "generate with prompt_lookup_num_tokens; batch_size=1, no recurrent target",
    "generate_assisted": "generate with assistant_model=draft.path; as generate_lookup",
    "draft_chain": "draft.path",
    "draft_tree": "draft.path with the target's tokenizer",
    "prompt_lookup": "nothing",
    "ngram": "nothing",
    "suffix": "nothing",
    "recycling": "nothing",
    "lookahead": "nothing",
    "early_exit": "a target whose layers all have keys of their own",
    "skip_layers": "as early_exit; prompts beyond data.num_prompts for its search, or "
    "self_draft.skip",
}
"""Methods without a head, with a description or their needs."""
OF_HEADS = ("chain", "tree", "suffix", "cut", "typical")
"""Ways of a head to draft, after the kind of head, as in `medusa_tree`."""


def list_methods() -> dict[str, str]:
    """Every method, with a description or its needs.

    With several heads of a kind, later ones are called `eagle_tree_2` and so on, in the order of
    `head.path` and `heads`.
    """
    from heads.kinds import HEADS  # imports torch, for which a refused name does not wait

    of_heads: dict[str, str] = {}
    for name, kind in HEADS.items():
        of_heads |= {f"{name}_{way}": kind.name_with_article for way in ("chain", "tree", "suffix")}
        of_heads[f"{name}_cut"] = (
            f"{kind.name_with_article} calibrated by eval/calibrate.py on this machine, at this "
            "depth"
        )
        if kind.has_static_tree:
            of_heads[f"{name}_typical"] = f"{kind.name_with_article}; temperature above 0; lossy"
    return METHODS | of_heads


def check_method_words(names: Sequence[str]) -> None:
    """Refuse names that are no method of any head, before heavy imports.

    Raises:
        InputError: naming the methods.
    """
    known = ("all", *METHODS)
    ends = tuple(f"_{way}" for way in OF_HEADS)
    unknown = [
        n
        for n in names
        if strip_head_number(n) not in known and not strip_head_number(n).endswith(ends)
    ]
    if unknown:
        raise InputError(
            f"methods={unknown}: unknown; allowed: {', '.join(known)}, and for a head its kind "
            f"with {', '.join(OF_HEADS)}, e.g. medusa_tree"
        )


def check_methods(names: Sequence[str]) -> None:
    """Refuse unknown names of methods.

    Raises:
        InputError: naming the methods.
    """
    known = list_methods()
    unknown = {name for name in names if strip_head_number(name) not in ("all", *known)}
    if unknown:
        raise InputError(f"methods={sorted(unknown)}: unknown; allowed: all, {', '.join(known)}")


def strip_head_number(name: str) -> str:
    """Name of a further head's method, without its number."""
    stem, _, number = name.rpartition("_")
    return stem if number.isdigit() else name
