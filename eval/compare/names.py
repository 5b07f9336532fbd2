"""The names of all ways to decode, and what each needs."""

from collections.abc import Sequence

from conf.errors import InputError

VANILLA = "vanilla"
BASELINES = (VANILLA, "generate")
"""Methods that draft nothing: both always run, and speed-ups are over the faster one."""
METHODS = {
    VANILLA: "the engine without drafting",
    "generate": "transformers' generate",
    "generate_lookup": "generate with prompt_lookup_num_tokens; one text at a time, no recurrent "
    "target",
    "generate_assisted": "generate with assistant_model=draft.path; as generate_lookup",
    "draft_chain": "draft.path",
    "draft_tree": "draft.path with the target's tokenizer",
    "prompt_lookup": "nothing",
    "ngram": "nothing",
    "suffix": "nothing",
    "recycling": "nothing",
    "lookahead": "nothing",
    "early_exit": "a target whose layers all have keys of their own",
    "skip_layers": "as early_exit; prompts beyond data.num_prompts to search on, or "
    "self_draft.skip",
}
"""Methods without a head, with what each is or needs."""
OF_HEADS = ("chain", "tree", "suffix", "cut", "typical")
"""Ways of a head to draft: its kind stands before, as in `medusa_tree`."""


def known_methods() -> dict[str, str]:
    """Every method, with a phrase of what it is or needs.

    With several heads of a kind, further ones are called `eagle_tree_2` and so on, in the order of
    `head.path` and `heads`.
    """
    from heads.kinds import HEADS  # with torch, which a refused name does not wait for

    of_heads: dict[str, str] = {}
    for name, kind in HEADS.items():
        of_heads |= {f"{name}_{way}": kind.phrase for way in ("chain", "tree", "suffix")}
        of_heads[f"{name}_cut"] = (
            f"{kind.phrase} that eval/calibrate.py has calibrated, on this machine and as deep"
        )
        if kind.static:
            of_heads[f"{name}_typical"] = f"{kind.phrase}; temperature above 0; lossy"
    return METHODS | of_heads


def check_words(names: Sequence[str]) -> None:
    """Refuses names that no head can make one of a method, before anything heavy is imported.

    Raises:
        InputError: with the names there are.
    """
    known = ("all", *METHODS)
    ends = tuple(f"_{way}" for way in OF_HEADS)
    unknown = [n for n in names if unnumbered(n) not in known and not unnumbered(n).endswith(ends)]
    if unknown:
        raise InputError(
            f"methods={unknown}: allowed: {', '.join(known)}, and of a head its kind and "
            f"{', '.join(OF_HEADS)}, e.g. medusa_tree"
        )


def check_methods(names: Sequence[str]) -> None:
    """Refuses names of no method.

    Raises:
        InputError: with the names there are.
    """
    known = known_methods()
    unknown = {name for name in names if unnumbered(name) not in ("all", *known)}
    if unknown:
        raise InputError(f"methods={sorted(unknown)}: allowed: all, {', '.join(known)}")


def unnumbered(name: str) -> str:
    """The name of a method of a further head, without its number."""
    stem, _, number = name.rpartition("_")
    return stem if number.isdigit() else name
