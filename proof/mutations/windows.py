"""Rules of pages: blocks of layers with a sliding window, which a request releases while it runs."""

from __future__ import annotations

from proof.mutations.operators import Become, Delete, DropArgument, MoveAfter, Never, SetArgument, Swap, Value
from proof.mutations.tables import Exempt, Fault, Feature

_STORED: frozenset[Feature] = frozenset({"window", "offload"})

MUTATIONS = (
    Fault("H15", "a request attends to pages that nobody wrote").without(
        "hit-has-the-pages-of-its-window", Value("None"), needs={"window"}
    ),
    Fault("H15", "a request attends to pages that no tier holds completely").without(
        "hit-needs-all-parts-of-a-page", Never(), needs=_STORED
    ),
    Fault("H11", "a request evicts the pages that it is about to use").without(
        "pages-are-leased-before-others-are-evicted", Swap(), needs={"window", "preempt"}
    ),
    Fault("H10", "a page behind the window is overwritten while it is being stored").without(
        "page-is-released-behind-its-last-reader", DropArgument("release", "until"), needs=_STORED
    ),
    Fault("H10", "the pages of a request that has ended are overwritten while they are being stored").without(
        "pages-are-released-after-the-last-step", DropArgument("release", "until"), needs=_STORED
    ),
    Fault("H23", "a page behind the window is released before its store is submitted").without(
        "store-of-a-page-is-submitted-before-its-release",
        MoveAfter("store-of-a-page-is-submitted-before-its-release"),
        at="store-is-submitted-before-its-blocks-are-released",
        needs=_STORED,
    ),
    Fault("H13", "the pages at the end of an answer are stored from a rank that has not written them yet").without(
        "store-of-pages-at-the-end-waits-for-every-rank",
        SetArgument("StorePlan", 2, "()"),
        needs={"window", "offload", "ranks"},
    ),
    Fault("H26", "a request is admitted without blocks for its pages, and the engine fails").without(
        "admission-needs-room-for-pages", Delete(), needs={"window", "preempt"}
    ),
    Fault("H11", "a chunk takes more blocks for pages than there are, and the engine fails").without(
        "chunk-has-its-pages", Never(), needs={"window", "preempt"}
    ),
    Fault("H14", "routers learn that blocks were removed which they never knew").without(
        "events-do-not-name-pages", Delete(), needs={"window"}
    ),
    Fault("H5", "a captured pass reads pages that a load is still writing").without(
        "captured-pages-wait-for-their-load", Value("layer"), needs={"window", "offload", "captured"}
    ),
    Fault(
        "H23", "a step does not declare the first page that it reads, so the checker does not see a missing wait"
    ).without("step-declares-its-pages", Value("windows.behind(row.min_start + size)"), needs={"window"}),
)

EQUIVALENT = (
    Fault("H15", "blocks of a token's own chunk are released, and not attended to")
    .without(
        "attention-chunk-reaches-back-to-its-border",
        Value("position if isinstance(window, AttentionChunk) else position + 1 - window"),
        needs={"window"},
    )
    .unreached(
        "no schedule has layers with chunked attention",
        "kv/test_layout.py::test_a_token_attends_to_no_block_before_its_chunk",
    ),
    Fault("H13", "a load overwrites a page that another rank still reads")
    .without(
        "page-is-released-behind-its-last-reader-on-every-rank",
        DropArgument("release", "after"),
        at="page-is-released-behind-its-last-reader",
        needs={"window", "offload", "ranks"},
    )
    .unreached(
        "no schedule loads into a page at once, while another rank still runs the step that read it last",
        "schedule/test_window_cache.py::test_a_page_behind_the_window_waits_for_its_step_on_all_ranks",
    ),
    Fault("H3", "a load overwrites a page that a step still reads")
    .without("fresh-page-waits-for-its-last-use", Delete(), needs=_STORED)
    .unseen(
        "the load also waits for the last uses of the request's new blocks, and these are the same steps",
        "schedule/test_window_cache.py::test_a_load_waits_for_the_last_uses_of_its_pages",
    ),
    Fault("H9", "pages with wrong KV stay findable, and belong to the next block with their key")
    .without("broken-request-invalidates-its-pages", Delete(), needs={"window", "bad_logits"})
    .unreached(
        "few schedules have windows and wrong logits, and compute the same block again",
        "engine/test_pages.py::test_non_finite_logits_drop_the_pages_of_their_request",
    ),
    Fault("H2", "a step overwrites a page that an earlier step still reads")
    .without("page-of-a-chunk-waits-for-its-last-use", Become("self._allocator.grow(request, stop)"), needs={"window"})
    .unseen(
        "all steps run on one stream, and a page is released after its transfers have ended",
        "schedule/test_window_cache.py::test_a_chunk_waits_for_the_last_uses_of_its_new_pages",
    ),
    Fault("H15", "no prefix is ever found")
    .without("pages-are-published-with-their-blocks", Delete(), needs={"window"})
    .unseen("reuse only saves time", "engine/test_pages.py::test_a_load_brings_the_pages_in_the_window_alone"),
    Fault("H15", "tiers lack the pages at the ends of prompts")
    .without("page-of-a-window-is-stored", Never(), needs=_STORED)
    .unseen(
        "reuse only saves time",
        "engine/test_pages.py::test_tiers_get_the_pages_of_the_windows_before_which_prompts_continue",
    ),
    Fault("H15", "tiers lack the pages at the ends of answers")
    .without("pages-at-the-end-are-stored", Delete(), needs=_STORED)
    .unseen("reuse only saves time", "engine/test_pages.py::test_pages_of_an_answer_are_stored_when_its_request_ends"),
    Fault("H15", "tiers lack pages that a prompt found on the device, and the next one computes them again")
    .without("pages-where-a-prompt-continues-are-stored", Delete(), needs=_STORED)
    .unseen("reuse only saves time", "engine/test_pages.py::test_pages_that_a_prompt_finds_on_the_device_are_stored"),
)

_LEASED = "see pages-are-released-after-the-last-step"
_LATE = "see pages-at-the-end-are-stored"

EXEMPT = (
    Exempt("Allocator.release", ("release",), _LEASED),
    Exempt("DeviceKeyLog.hide", ("add",), "see events-do-not-name-pages"),
    Exempt("DeviceKeyLog.cleared", ("clear",), "see events-do-not-name-pages"),
    Exempt("Lease.split", ("_open",), "a check of the caller, which the pool's own checks repeat"),
    Exempt("PrefixCache.forget_all", ("forget_all",), _LATE),
    Exempt("PrefixCache.drop", ("forget",), "see broken-request-invalidates-its-pages"),
    Exempt("WindowCache.start", ("share", "take", "extend"), _LEASED),
    Exempt("WindowCache.grow", ("take", "extend"), _LEASED),
    Exempt("WindowCache.store_latest", ("clear",), _LATE),
    Exempt("WindowCache.forget", ("forget",), "see broken-request-invalidates-its-pages"),
    Exempt("WindowCache.forget_all", ("clear",), _LATE),
    Exempt("WindowedLayers.of", ("replace",), "this replace only copies a dataclass with some fields changed"),
    Exempt("grouped_batch", ("replace",), "this replace only copies a dataclass with some fields changed"),
)
