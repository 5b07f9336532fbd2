"""Reader of exported DFlash heads. See `eval/parity/blocks.py`."""

from eval.parity.blocks import BlockConfigReader, BlockShape, ServedBlocks
from eval.parity.export_files import Export, ReferenceLogits

FORMATS = {"dflash": ("vllm", "sglang", "speculators", "original")}
NATIVE = "DFlashDraftModel"
ARCHITECTURES = dict.fromkeys(FORMATS["dflash"], NATIVE)


def build_head(export: Export, golden: ReferenceLogits) -> ServedBlocks:
    """See `eval.parity.parity_check.Reader`."""
    reader = BlockConfigReader(export, golden, ARCHITECTURES)
    return ServedBlocks(export, golden, shape_of(reader), {})


def shape_of(reader: BlockConfigReader) -> BlockShape:
    """Read the shape of a head that fills in masks.

    Raises:
        InputError: as in `BlockConfigReader.shape`.
    """
    root = reader.root
    if reader.is_speculators:
        root.check_equal(
            "sample_from_anchor", False, "as rows draft the token at their place", "guesses"
        )
        return reader.parse_shape(root, anchored=False, causal=reader.parse_speculators_causal())
    block = root.get_section("dflash_config")
    causal = reader.parse_causal(block, "causal")
    root.check_allowed("is_causal", causal)
    root.check_allowed("sample_from_anchor", False)
    return reader.parse_shape(block, anchored=False, causal=causal)
