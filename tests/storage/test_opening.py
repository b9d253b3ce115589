"""How URLs of object stores are read."""

import pytest

from forgekeeper.storage import sentinel
from forgekeeper.storage.objects import Objects, StoreUnavailable
from forgekeeper.storage.opening import reason
from tests.harness.installation import INSTALLATION


def refusal(url):
    with pytest.raises(StoreUnavailable) as caught:
        Objects("artifacts", url, installation=INSTALLATION)
    return str(caught.value)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_an_unknown_option_is_refused_by_its_name_and_without_its_value(scheme):
    said = refusal(f"{scheme}://bucket?secret_acces_key=hush&allow_http=true")

    assert "unknown option secret_acces_key" in said
    assert "hush" not in said


@pytest.mark.parametrize("url", ["s3://AKIA:hush@bucket/prefix", "s3://bucket?secret_access_key=hu#sh"])
def test_a_key_in_the_wrong_place_is_refused_without_repeating_it(url):
    said = refusal(url)

    assert "percent-encoded" in said
    assert "hu" not in said


def test_a_key_may_contain_plus_and_slash_and_percent_encoded_letters():
    opened = Objects(
        "artifacts", "s3://bucket?access_key_id=AKIA&secret_access_key=a+b/c=%23%26", installation=INSTALLATION
    )

    assert opened.store.config["secret_access_key"] == "a+b/c=#&"


def test_a_prefix_keeps_to_itself(s3):
    s3.put("inside/a", "a")
    inside = s3.url.replace("?", "/inside?")
    sentinel.Store("artifacts", inside).create_sentinel(INSTALLATION)

    Objects("artifacts", inside, installation=INSTALLATION).delete(["a"])

    assert s3.keys() == {"a", "inside/.forgekeeper-root"}


def test_a_reason_leaves_out_what_an_address_carries_behind_its_question_mark():
    said = reason(ValueError("Error performing DELETE https://host/c/b?sv=1&sig=hush in 3.1ms - denied\nDebug source"))

    assert said == "Error performing DELETE https://host/c/b - denied"
