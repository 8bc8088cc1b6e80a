"""Rules of pages: blocks of layers with a sliding window, which a request releases while it runs."""

from __future__ import annotations

from proof.mutations.operators import Become, Delete, DropArgument, MoveAfter, Never, SetArgument, Swap, Value
from proof.mutations.tables import Equivalent, Exempt, Feature, Mutation

_STORED: frozenset[Feature] = frozenset({"window", "offload"})

MUTATIONS = (
    Mutation(
        name="hit-has-the-pages-of-its-window",
        hazard="H15",
        change=Value("None"),
        consequence="a request attends to pages that nobody wrote",
        needs=frozenset({"window"}),
    ),
    Mutation(
        name="hit-needs-all-parts-of-a-page",
        hazard="H15",
        change=Never(),
        consequence="a request attends to pages that no tier holds completely",
        needs=_STORED,
    ),
    Mutation(
        name="pages-are-leased-before-others-are-evicted",
        hazard="H11",
        change=Swap(),
        consequence="a request evicts the pages that it is about to use",
        needs=frozenset({"window", "preempt"}),
    ),
    Mutation(
        name="page-is-released-behind-its-last-reader",
        hazard="H10",
        change=DropArgument("release", "until"),
        consequence="a page behind the window is overwritten while it is being stored",
        needs=_STORED,
    ),
    Mutation(
        name="pages-are-released-after-the-last-step",
        hazard="H10",
        change=DropArgument("release", "until"),
        consequence="the pages of a request that has ended are overwritten while they are being stored",
        needs=_STORED,
    ),
    Mutation(
        name="store-of-a-page-is-submitted-before-its-release",
        hazard="H23",
        at="store-is-submitted-before-its-blocks-are-released",
        change=MoveAfter("store-of-a-page-is-submitted-before-its-release"),
        consequence="a page behind the window is released before its store is submitted",
        needs=_STORED,
    ),
    Mutation(
        name="store-of-pages-at-the-end-waits-for-every-rank",
        hazard="H13",
        change=SetArgument("StorePlan", 2, "()"),
        consequence="the pages at the end of an answer are stored from a rank that has not written them yet",
        needs=frozenset({"window", "offload", "ranks"}),
    ),
    Mutation(
        name="admission-needs-room-for-pages",
        hazard="H26",
        change=Delete(),
        consequence="a request is admitted without blocks for its pages, and the engine fails",
        needs=frozenset({"window", "preempt"}),
    ),
    Mutation(
        name="chunk-has-its-pages",
        hazard="H11",
        change=Never(),
        consequence="a chunk takes more blocks for pages than there are, and the engine fails",
        needs=frozenset({"window", "preempt"}),
    ),
    Mutation(
        name="events-do-not-name-pages",
        hazard="H14",
        change=Delete(),
        consequence="routers learn that blocks were removed which they never knew",
        needs=frozenset({"window"}),
    ),
    Mutation(
        name="captured-pages-wait-for-their-load",
        hazard="H5",
        change=Value("layer"),
        consequence="a captured pass reads pages that a load is still writing",
        needs=frozenset({"window", "offload", "captured"}),
    ),
    Mutation(
        name="step-declares-its-pages",
        hazard="H23",
        change=Value("windows.behind(row.min_start + size)"),
        consequence="a step does not declare the first page that it reads, so the checker does not see a missing wait",
        needs=frozenset({"window"}),
    ),
)

EQUIVALENT = (
    Equivalent(
        Mutation(
            name="page-is-released-behind-its-last-reader-on-every-rank",
            hazard="H13",
            at="page-is-released-behind-its-last-reader",
            change=DropArgument("release", "after"),
            consequence="a load overwrites a page that another rank still reads",
            needs=frozenset({"window", "offload", "ranks"}),
        ),
        "no schedule loads into a page at once, while another rank still runs the step that read it last",
        noticed_by="schedule/test_window_cache.py::test_a_page_behind_the_window_waits_for_its_step_on_all_ranks",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="fresh-page-waits-for-its-last-use",
            hazard="H3",
            change=Delete(),
            consequence="a load overwrites a page that a step still reads",
            needs=_STORED,
        ),
        "the load also waits for the last uses of the request's new blocks, and these are the same steps",
        noticed_by="schedule/test_window_cache.py::test_a_load_waits_for_the_last_uses_of_its_pages",
    ),
    Equivalent(
        Mutation(
            name="broken-request-invalidates-its-pages",
            hazard="H9",
            change=Delete(),
            consequence="pages with wrong KV stay findable, and belong to the next block with their key",
            needs=frozenset({"window", "bad_logits"}),
        ),
        "few schedules have windows and wrong logits, and compute the same block again",
        noticed_by="engine/test_pages.py::test_non_finite_logits_drop_the_pages_of_their_request",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="page-of-a-chunk-waits-for-its-last-use",
            hazard="H2",
            change=Become("self._allocator.grow(request, stop)"),
            consequence="a step overwrites a page that an earlier step still reads",
            needs=frozenset({"window"}),
        ),
        "all steps run on one stream, and a page is released after its transfers have ended",
        noticed_by="schedule/test_window_cache.py::test_a_chunk_waits_for_the_last_uses_of_its_new_pages",
    ),
    Equivalent(
        Mutation(
            name="pages-are-published-with-their-blocks",
            hazard="H15",
            change=Delete(),
            consequence="no prefix is ever found",
            needs=frozenset({"window"}),
        ),
        "reuse only saves time",
        noticed_by="engine/test_pages.py::test_a_load_brings_the_pages_in_the_window_alone",
    ),
    Equivalent(
        Mutation(
            name="page-of-a-window-is-stored",
            hazard="H15",
            change=Never(),
            consequence="tiers lack the pages at the ends of prompts",
            needs=_STORED,
        ),
        "reuse only saves time",
        noticed_by="engine/test_pages.py::test_tiers_get_the_pages_of_the_windows_before_which_prompts_continue",
    ),
    Equivalent(
        Mutation(
            name="pages-at-the-end-are-stored",
            hazard="H15",
            change=Delete(),
            consequence="tiers lack the pages at the ends of answers",
            needs=_STORED,
        ),
        "reuse only saves time",
        noticed_by="engine/test_pages.py::test_pages_of_an_answer_are_stored_when_its_request_ends",
    ),
    Equivalent(
        Mutation(
            name="pages-where-a-prompt-continues-are-stored",
            hazard="H15",
            change=Delete(),
            consequence="tiers lack pages that a prompt found on the device, and the next one computes them again",
            needs=_STORED,
        ),
        "reuse only saves time",
        noticed_by="engine/test_pages.py::test_pages_that_a_prompt_finds_on_the_device_are_stored",
    ),
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
