"""Methods of decoding that `eval/speedup.py` compares, built from the settings of a run."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from conf.command.jsonl_store import JsonlStore
from conf.errors import InputError
from conf.settings.measure import SpeedupRun
from conf.settings.target import TargetConfig
from eval.decode.cuda_graphs import CaptureError, GraphDecoder, find_capture_obstacle
from eval.decode.drafters.cross_tokenizer import CrossTokenizerDrafter
from eval.decode.drafters.draft_model import DraftLength, DraftModel, has_same_tokenizer
from eval.decode.drafters.lookahead import Lookahead
from eval.decode.drafters.lookup import (
    CPU_NODES,
    GPU_NODES,
    NgramModel,
    PromptLookup,
    Recycling,
    SuccessorTable,
    build_recycling_tree,
)
from eval.decode.drafters.self_speculation import SelfDraft, list_skipped_layers
from eval.decode.drafters.suffix import HybridDrafter, SuffixDrafter, SuffixTree
from eval.decode.engine import Generation, NoDraft, Request, decode_many
from eval.decode.generation_config import apply_generation_config
from eval.decode.hf_generate import hf_generate
from eval.measure.measured_head import MeasuredHead
from eval.measure.measurement import Measurement, gather_items, print_notes
from eval.measure.target_answers import generate_greedy_answers
from eval.preflight_checks import BASELINES, VANILLA, list_methods, strip_head_number
from eval.tune.skip_search import search_skipped_layers
from heads.decoding.drafting import Drafter
from heads.decoding.sampling import GREEDY, Sampling, Typical, drafter_seeds
from heads.decoding.tree import Tree, make_default_tree
from heads.kinds import HEADS, find_kind_name
from heads.layers.fast_linear import make_low_rank_target, pack_weights
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.load import load_target
from heads.target_model.model import Target

SEARCHED = -1
"""Row of a journal with the result of the search for layers."""

Store = TypeVar("Store")


@dataclass(frozen=True)
class Method:
    """Method of decoding.

    Attributes:
        run: function that decodes prompts with one seed each, `batch_size` at a time.
        tree: static tree of its drafts, if any.
        lossy: whether texts may differ in distribution from the target's own.
        settings: values of settings that were left unset, for the results file.
        forget: function that drops what the drafters learnt from earlier texts; None if they learn
            nothing.
    """

    run: Callable[[Sequence[list[int]], Sequence[int], int], list[Generation]]
    tree: Tree | None = None
    lossy: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    forget: Callable[[], None] | None = None


class PromptDecoder:
    """Decodes prompts, in captured steps if possible.

    Args:
        target: target that decodes.
        make: function that makes a drafter for texts with these seeds.
        max_new_tokens: largest number of tokens per text.
        sampling: how tokens are chosen.
        capture: whether steps may be CUDA graphs.

    Attributes:
        settings: on a GPU, `captured`: the part of a step that is one launch, or why none is.
    """

    def __init__(
        self,
        target: Target,
        make: Callable[[list[int]], Drafter],
        max_new_tokens: int,
        sampling: Sampling,
        capture: bool,
    ) -> None:
        self.target, self.make, self.sampling = target, make, sampling
        self.max_new_tokens, self.settings = max_new_tokens, dict[str, Any]()
        self._captured: GraphDecoder | None = None
        if target.device.type == "cuda":
            why = find_capture_obstacle(target) if capture else "cuda_graphs=false"
            self._captured = None if why else GraphDecoder(target, make, max_new_tokens, sampling)
            self.settings["captured"] = self._captured.what if self._captured else f"no: {why}"

    def __call__(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], batch_size: int
    ) -> list[Generation]:
        """Decode prompts with one seed each, `batch_size` at a time."""
        requests = list(map(Request, prompts, seeds))
        if self._captured is not None:
            try:
                return self._captured.decode_requests(requests, batch_size)
            except CaptureError as error:
                self._captured, self.settings["captured"] = None, f"no: {error}"
                print_notes(
                    "steps are launched operation by operation, as CUDA cannot capture them "
                    f"({error}); cuda_graphs=false does not try"
                )
        return decode_many(
            self.target, self.make, requests, self.max_new_tokens, batch_size, self.sampling
        )


def choose_methods(
    measurement: Measurement, config: SpeedupRun
) -> dict[str, Callable[..., Method]]:
    """Choose the makers of the methods that the settings ask for, baselines first.

    Raises:
        InputError: a method lacks its head, draft model, prompts or batch size.
    """
    builder = MethodBuilder(measurement, config)
    known = builder.list_makers()
    if "all" in config.methods:
        if measurement.is_main_process:
            print_notes(*(f"{name} is left out: {why}" for name, why in builder.obstacles.items()))
        return known
    missing = sorted(set(config.methods) - set(known))
    if missing:
        needed = list_methods()
        reasons = "; ".join(
            f"{name}: {builder.obstacles[name]}"
            if name in builder.obstacles
            else f"needs {name} ({needed[strip_head_number(name)]})"
            for name in missing
        )
        raise InputError(f"methods={missing}: {reasons}; available here: {', '.join(known)}")
    return {name: known[name] for name in known if name in (*BASELINES, *config.methods)}


def build_methods(
    measurement: Measurement,
    config: SpeedupRun,
    chosen: dict[str, Callable[..., Method]],
    journal: JsonlStore,
) -> dict[str, Method]:
    """Build the chosen methods, with results of searches from the journal."""
    if "skip_layers" in chosen and config.self_draft.skip is None:
        if SEARCHED not in journal.done_ids:
            journal.append([{"id": SEARCHED, **_search_layers_to_skip(measurement, config)}])
        (row,) = (row for row in journal.load_rows() if row["id"] == SEARCHED)
        make = partial(chosen["skip_layers"], row["skip"], row["num_tokens"])
        chosen = chosen | {"skip_layers": make}
    return {name: make() for name, make in chosen.items()}


def _search_layers_to_skip(measurement: Measurement, config: SpeedupRun) -> dict[str, Any]:
    """Search layers to skip and a number of draft tokens, on prompts that are not measured."""
    prompts = [prompt.token_ids for prompt in measurement.spare_prompts]
    answers = generate_greedy_answers(measurement.target, prompts, config.max_new_tokens)
    texts = [ids + answer for ids, answer in zip(prompts, answers, strict=True)]
    best = search_skipped_layers(measurement.target, texts, list(map(len, prompts)))[0][0]
    if measurement.is_main_process:
        print_notes(
            f"skip_layers: without layers {list(best.skip)}, {best.num_tokens} draft tokens, "
            f"found on {len(prompts)} prompts that are not measured"
        )
    # Every process searched; all use the first one's result.
    return gather_items([{"skip": list(best.skip), "num_tokens": best.num_tokens}])[0]


def _make_hybrid(head: MeasuredHead, seeds: list[int], suffix: SuffixDrafter) -> HybridDrafter:
    # Greedy, as sampled candidates cannot stand beside a copied text.
    drafter = head.make_drafter("tree", GREEDY, seeds)
    return HybridDrafter(drafter, suffix, head.tree.depth / 2)


class MethodBuilder:
    """Makes methods from the settings of a run.

    Attributes:
        obstacles: reasons why methods whose settings are given are not among the makers, by name.
    """

    def __init__(self, measurement: Measurement, config: SpeedupRun) -> None:
        self.measurement, self.config = measurement, config
        self.obstacles: dict[str, str] = {}
        self.target, self.sampling = measurement.target, measurement.sampling

    def list_makers(self) -> dict[str, Callable[..., Method]]:
        """List the makers of all methods that the settings allow, by name."""
        lookup, lookahead = self.config.lookup, self.config.lookahead
        makers: dict[str, Callable[..., Method]] = {
            VANILLA: lambda: self._build_engine_method(lambda _: NoDraft(), Tree.make_chain(0)),
            "generate": self._build_generate_method,
        }
        # transformers' own methods cannot roll back a state.
        single = self.config.batch_sizes == [1] and not self.target.is_recurrent
        if single:
            makers["generate_lookup"] = partial(
                self._build_generate_method, prompt_lookup_num_tokens=lookup.num_tokens,
                max_matching_ngram_size=lookup.max_ngram,
            )  # fmt: skip
        counts: Counter[str] = Counter()
        for head in self.measurement.heads:
            family = find_kind_name(head.draft_head)
            counts[family] += 1
            number = f"_{counts[family]}" if counts[family] > 1 else ""
            for shape in ("chain", "tree"):
                makers[f"{family}_{shape}{number}"] = partial(self._build_head_method, head, shape)
            makers[f"{family}_suffix{number}"] = partial(
                self._build_suffix_method, partial(_make_hybrid, head)
            )
            if HEADS[family].has_static_tree and not self.sampling.is_greedy:
                rule = Typical(self.config.typical.threshold, self.config.typical.alpha)
                makers[f"{family}_typical{number}"] = partial(
                    self._build_head_method, head, "tree", replace(self.sampling, typical=rule)
                )
        if self.config.draft.path is not None:
            makers |= self._list_draft_model_makers(self.config.draft.path, single)

        limits = (lookup.num_tokens, lookup.max_ngram, lookup.min_ngram)
        guesses = (lookahead.window, lookahead.level, lookahead.num_guesses)
        usual = GPU_NODES if self.target.device.type == "cuda" else CPU_NODES
        recycled = build_recycling_tree(self.config.recycling.num_tokens or usual)
        makers |= {
            "prompt_lookup": lambda: self._build_engine_method(lambda _: PromptLookup(*limits)),
            "ngram": lambda: self._build_engine_method(lambda _: NgramModel(*limits)),
            "suffix": lambda: self._build_suffix_method(lambda _, suffix: suffix),
            "recycling": lambda: self._build_remembering_method(
                SuccessorTable, lambda _, store: Recycling(store, recycled), recycled
            ),
            "lookahead": lambda: self._build_engine_method(lambda _: Lookahead(*guesses)),
        }
        if not self.target.attention_pattern.shares_keys:
            makers["early_exit"] = self._build_early_exit_method
            if self.measurement.spare_prompts or self.config.self_draft.skip is not None:
                makers["skip_layers"] = self._build_skip_layers_method
            else:
                self.obstacles["skip_layers"] = (
                    "it searches layers on prompts that are not measured, but all are measured; "
                    "lower data.num_prompts or set self_draft.skip"
                )
        return makers

    def _build_engine_method(
        self,
        make: Callable[[list[int]], Drafter],
        tree: Tree | None = None,
        sampling: Sampling | None = None,
    ) -> Method:
        chosen_sampling, length = sampling or self.sampling, self.config.max_new_tokens
        run = PromptDecoder(self.target, make, length, chosen_sampling, self.config.cuda_graphs)
        return Method(run, tree, chosen_sampling.is_lossy, run.settings)

    def _build_remembering_method(
        self,
        store: Callable[[], Store],
        make: Callable[[list[int], Store], Drafter],
        tree: Tree | None = None,
    ) -> Method:
        """Build a method whose drafters share a store of earlier texts."""
        shared = [store()]

        def forget() -> None:
            shared[0] = store()

        return replace(
            self._build_engine_method(lambda seeds: make(seeds, shared[0]), tree), forget=forget
        )

    def _build_generate_method(self, **assistance: object) -> Method:
        def run(
            prompts: Sequence[list[int]], seeds: Sequence[int], batch_size: int
        ) -> list[Generation]:
            texts: list[Generation] = []
            for start in range(0, len(prompts), batch_size):
                texts += hf_generate(
                    self.target, prompts[start : start + batch_size], self.config.max_new_tokens,
                    self.sampling, seeds[start], **assistance,
                )  # fmt: skip
            return texts

        return Method(run)

    def _build_head_method(
        self, head: MeasuredHead, shape: str, sampling: Sampling | None = None
    ) -> Method:
        tree, chosen = head.tree if shape == "tree" else head.chain, sampling or self.sampling
        return self._build_engine_method(
            lambda seeds: head.make_drafter(shape, chosen, seeds),
            tree if isinstance(tree, Tree) else None,
            chosen,
        )

    def _list_draft_model_makers(self, path: str, single: bool) -> dict[str, Callable[[], Method]]:
        settings = self.config.draft
        reference = TargetConfig(path, settings.revision, dtype=self.config.target.dtype)
        model = load_target(reference, self.target.device)
        pack_weights(model.model, model.output_head)
        model.output_head = self._select_drafting_ends(model).output_head
        if not has_same_tokenizer(self.target, model):
            for name in ("draft_tree", "generate_assisted"):
                self.obstacles[name] = "the tokenizer of draft.path is not the target's"
            cross = (model, self.target.tokenizer, settings.num_tokens)
            make = partial(self._build_engine_method, lambda _: CrossTokenizerDrafter(*cross))
            return {"draft_chain": make}
        num_tokens, first, paths = settings.num_tokens, None, settings.tree
        if settings.heuristic:
            num_tokens, first = settings.max_tokens, settings.num_tokens
        makers: dict[str, Callable[[], Method]] = {
            "draft_chain": lambda: self._build_draft_model_method(
                model, Tree.make_chain(num_tokens), DraftLength(first, settings.confidence)
            ),
            "draft_tree": lambda: self._build_draft_model_method(
                model, Tree.from_paths(paths) if paths else make_default_tree(settings.num_tokens)
            ),
        }
        # transformers takes differently padded vocabularies for different tokenizers.
        sizes = {self.target.config.vocab_size, model.config.vocab_size}
        if single and len(sizes) > 1:
            self.obstacles["generate_assisted"] = (
                "transformers' assisted generation refuses vocabularies of "
                f"{' and '.join(map(str, sorted(sizes)))} rows; name another draft.path"
            )
        elif single:
            apply_generation_config(model, plain=True)
            config = model.model.generation_config
            config.num_assistant_tokens = settings.num_tokens
            config.num_assistant_tokens_schedule = "heuristic" if settings.heuristic else "constant"
            config.assistant_confidence_threshold = settings.confidence
            makers["generate_assisted"] = partial(
                self._build_generate_method, assistant_model=model.model
            )
        return makers

    def _select_drafting_ends(self, model: Target) -> EmbeddingsAndOutputHead:
        """Return the embeddings and the output head with which a model drafts."""
        rank = self.config.output_rank
        return model if rank is None else make_low_rank_target(model, rank)

    def _build_draft_model_method(
        self, model: Target, tree: Tree, length: DraftLength | None = None
    ) -> Method:
        def make(seeds: list[int]) -> Drafter:
            drawn = (self.sampling, drafter_seeds(seeds))
            return DraftModel(model, tree, *drawn, length, self.target.vocab_size)

        return self._build_engine_method(make, tree)

    def _build_suffix_method(self, make: Callable[[list[int], SuffixDrafter], Drafter]) -> Method:
        given = self.config.suffix
        limits = given.num_tokens, given.factor, given.min_prob
        return self._build_remembering_method(
            lambda: SuffixTree(given.max_ngram),
            lambda seeds, answers: make(seeds, SuffixDrafter(answers, *limits)),
        )

    def _build_early_exit_method(self) -> Method:
        settings = self.config.self_draft
        num_layers = settings.num_layers or max(1, self.target.num_layers // 2)
        if num_layers > self.target.num_layers:
            raise InputError(
                f"self_draft.num_layers={num_layers}: must be below {self.target.num_layers}, the "
                "target's layers"
            )
        return self._build_self_draft_method(
            list_skipped_layers(self.target, num_layers), settings.num_tokens
        )

    def _build_skip_layers_method(
        self, searched: list[int] | None = None, num_tokens: int | None = None
    ) -> Method:
        """Build the method that skips the layers of the settings, or the layers of a search."""
        settings = self.config.self_draft
        skip = settings.skip if searched is None else searched
        assert skip is not None
        outside = [layer for layer in skip if not 0 <= layer < self.target.num_layers]
        if outside:
            raise InputError(
                f"self_draft.skip={outside}: not in the target, which has layers "
                f"0..{self.target.num_layers - 1}; name these"
            )
        made = self._build_self_draft_method(tuple(skip), settings.num_tokens or num_tokens)
        assert made.tree is not None
        made.settings.update({"skip": skip, "chain": made.tree.depth})
        return made

    def _build_self_draft_method(self, skip: tuple[int, ...], length: int | None) -> Method:
        ends, num_tokens = self._select_drafting_ends(self.target), length or 4

        def make(seeds: list[int]) -> Drafter:
            draft_seeds = drafter_seeds(seeds)
            return SelfDraft(self.target, skip, num_tokens, self.sampling, draft_seeds, ends)

        return self._build_engine_method(make, Tree.make_chain(num_tokens))
