"""Behind a proxy that serves the API below a prefix, whether it strips the prefix or not."""

from __future__ import annotations

import logging

import pytest

from sidestream.errors import ConfigError
from sidestream.server import ServerOptions

from .serving import HI, request_lines, serving


@pytest.mark.parametrize("prefix", ["/llm/v2", ""], ids=["not stripped", "stripped"])
def test_every_route_answers_with_and_without_the_prefix(prefix: str) -> None:
    with serving(root_path="/llm/v2", served_model_name="a/b") as served:
        for path in ("/v1/models", "/v1/models/a/b", "/health", "/ping", "/version", "/metrics"):
            assert served.http.get(prefix + path).status_code == 200, path
        bodies = {
            "/v1/chat/completions": {"model": "a/b", "messages": HI},
            "/v1/completions": {"model": "a/b", "prompt": "hi"},
            "/tokenize": {"prompt": "hi"},
            "/detokenize": {"tokens": [1]},
        }
        for path, body in bodies.items():
            assert served.http.post(prefix + path, json=body).status_code == 200, path


@pytest.mark.parametrize("prefix", ["/llm", ""], ids=["not stripped", "stripped"])
def test_errors_keys_and_log_lines_are_the_same_with_a_prefix(prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sidestream.server")
    with serving(root_path="/llm", api_key="k") as served:
        nobody = {"authorization": ""}
        assert served.http.get(f"{prefix}/nowhere").json()["error"]["code"] == "unknown_url"
        assert served.http.get(f"{prefix}/tokenize").status_code == 405
        assert served.http.get(f"{prefix}/v1/models/x").json()["error"]["code"] == "model_not_found"
        assert served.http.get(f"{prefix}/v1/models", headers=nobody).status_code == 401
        assert served.http.get(f"{prefix}/health", headers=nobody).status_code == 200
        assert served.http.get(f"{prefix}/ping", headers=nobody).status_code == 200
        for path in ("/llmx/health", "/llm/llm/health"):
            assert served.http.get(path).json()["error"]["code"] == "unknown_url"
    lines = request_lines(caplog)
    assert f" {prefix}/nowhere status=404" in lines[0]  # the path as it came
    assert not any("health" in line and "status=200" in line for line in lines)


@pytest.mark.parametrize("path", ["llm", "/", "/llm/", "//llm", "/l m", "/l%6Dm", "/llm?x", "/é"])
def test_an_invalid_root_path_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"root_path is .*: it must begin with a slash, end without one"):
        ServerOptions(root_path=path)


@pytest.mark.parametrize("path", ["/v1", "/v1/llm"])
def test_a_root_path_of_the_apis_own_paths_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"root_path is .*: the API's own paths begin with /v1"):
        ServerOptions(root_path=path)
