"""The tier `s3`, on a real server with the API of Amazon S3."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from proof.store_servers import S3Server
from sidestream_kv.config import OffloadConfig
from sidestream_kv.errors import ConfigError, TierCorrupt, TierError
from sidestream_kv.offload.tiers.base import PersistentTier, TierContext
from sidestream_kv.offload.tiers.index import Entry
from sidestream_kv.offload.tiers.stack import open_tiers
from sidestream_kv.offload.tiers.store_tier import StoreTier, value_bytes
from sidestream_order import tier_conformance
from sidestream_order.tier_conformance import TierConformance, holds, key, reads_as_corrupt, write

LAYOUT = tier_conformance._LAYOUT
CONTEXT = TierContext(LAYOUT, "a model")
WHY_NONE = S3Server.why_none()
pytestmark = pytest.mark.skipif(WHY_NONE is not None, reason=str(WHY_NONE))


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


def open_s3(server: S3Server, prefix: str, context: TierContext = CONTEXT, **options: object) -> StoreTier:
    given = {"url": f"s3://{server.bucket}/{prefix}", "endpoint": server.endpoint, "region": "us-east-1", **options}
    (tier,) = open_tiers(OffloadConfig(tiers={"s3": given}), context).values()
    assert isinstance(tier, StoreTier)
    return tier


def damage(server: S3Server, tier: StoreTier, entry: Entry) -> None:
    name = tier._named(entry)[0].replace(":", "/")
    value = server.read(name)
    server.write(name, value[:-1] + bytes([value[-1] ^ 1]))


class TestS3Tier(TierConformance):
    @pytest.fixture(autouse=True)
    def _server(self, server: S3Server, request: pytest.FixtureRequest) -> None:
        self.server, self.prefix = server, request.node.name

    def open(self, context: TierContext, *, capacity_blocks: int) -> PersistentTier:
        return open_s3(self.server, self.prefix, context, capacity=capacity_blocks * value_bytes(context.layout))

    def damage(self, tier: PersistentTier, entry: Entry) -> None:
        assert isinstance(tier, StoreTier)
        damage(self.server, tier, entry)


def test_what_one_engine_wrote_another_finds_and_reads(server: S3Server) -> None:
    one, other = open_s3(server, "shared"), open_s3(server, "shared")
    write(one, "a")
    assert [entry.key for entry in other.find([key("a"), key("b")])] == [key("a")]
    other.index.learn(other.find([key("a")]))
    assert holds(other, "a")
    assert all(name.startswith("shared/") for name in server.objects() if name.startswith("shared"))


def test_a_damaged_object_is_deleted_and_a_miss(server: S3Server) -> None:
    tier = open_s3(server, "lies")
    entry = write(tier, "a")
    damage(server, tier, entry)
    with pytest.raises(TierCorrupt, match="deleted"):
        tier.read(entry, np.zeros(LAYOUT.block_bytes, np.uint8))
    assert tier.find([key("a")]) == [] and reads_as_corrupt(tier, entry)


def test_a_value_that_another_engine_has_written_since_is_not_deleted(server: S3Server) -> None:
    one, other = open_s3(server, "again"), open_s3(server, "again")
    entry = write(one, "a")
    write(other, "a")
    one.delete([entry])
    assert holds(other, "a")


def test_a_server_that_stalls_costs_its_timeout_once(server: S3Server) -> None:
    tier = open_s3(server, "stall", timeout_s=0.3)
    entry = write(tier, "a")
    server.stall()
    try:
        began_s = time.monotonic()
        for _ in range(3):
            with pytest.raises(TierError):
                tier.read(entry, np.zeros(LAYOUT.block_bytes, np.uint8))
        assert time.monotonic() - began_s < 2.5
    finally:
        server.go_on()


def test_an_engine_starts_without_its_server(caplog: pytest.LogCaptureFixture) -> None:
    options = {"url": "s3://kv-cache", "endpoint": "http://127.0.0.1:1", "region": "us-east-1"}
    (tier,) = open_tiers(OffloadConfig(tiers={"s3": options}), CONTEXT).values()
    tier.close()
    assert "until it answers, blocks are neither stored there nor found" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "s3 url is None: give s3://BUCKET"),
        ({"url": "https://bucket"}, "s3 url is 'https://bucket': give s3://BUCKET"),
        ({"url": "s3://b", "endpoint": "127.0.0.1:9000"}, "s3 endpoint is '127.0.0.1:9000': give the server's URL"),
        ({"url": "s3://b", "timeout": 1}, "no option of the tier s3 timeout; did you mean timeout_s"),
        ({"url": "s3://b", "timeout_s": 0}, "timeout_s is 0: give a positive number"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_tiers(OffloadConfig(tiers={"s3": options}), CONTEXT)


def test_a_bucket_that_does_not_exist_is_refused(server: S3Server) -> None:
    options = {"url": "s3://no-such-bucket", "endpoint": server.endpoint, "region": "us-east-1"}
    with pytest.raises(ConfigError, match="there is no such bucket; create it"):
        open_tiers(OffloadConfig(tiers={"s3": options}), CONTEXT)


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"pip install 'sidestream-kv\[s3\]'"):
        open_tiers(OffloadConfig(tiers={"s3": {"url": "s3://b"}}), CONTEXT)
