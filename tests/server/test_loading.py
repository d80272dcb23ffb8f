"""A server whose model is not there yet."""

from __future__ import annotations

import httpx2
import openai
import pytest

from model.server.http.settings import ServerSettings
from model.server.loading import bound_socket, told_to_wait


def test_a_server_is_alive_before_its_model_is_there() -> None:
    with bound_socket(ServerSettings(port=0)) as bound:
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with told_to_wait(bound):
            assert httpx2.get(f"{url}/health").status_code == 200
            assert httpx2.get(f"{url}/ready").status_code == 503
            with pytest.raises(openai.InternalServerError, match="is being loaded") as refused:
                client.completions.create(model="any", prompt="def")
        assert refused.value.status_code == 503
        assert refused.value.response.headers["retry-after"] == "1"
