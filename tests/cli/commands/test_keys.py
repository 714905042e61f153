"""`batchwright key …`: made once, shown once, revoked for good."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Inside


def test_a_key_alone_goes_to_standard_output_and_nowhere_else(inside: Inside) -> None:
    code, out, err = inside("key", "create", "laptop", "--tenant", "acme", "--expires-in", "90d")
    secret = out.strip()
    assert code == 0
    assert secret.startswith("bw_")
    assert secret not in err
    assert "tenant acme · read submit operate" in err
    (key,) = inside.json("key", "list")
    assert (key["name"], key["tenant"], key["scopes"]) == ("laptop", "acme", ["read", "submit", "operate"])
    assert secret.startswith(key["hint"])
    assert secret not in inside("key", "list")[1]


def test_scopes_are_what_was_asked_for(inside: Inside) -> None:
    made = inside.json("key", "create", "ci", "--scope", "submit", "--admin")
    assert made["scopes"] == ["submit", "admin"]
    assert made["secret"].startswith(made["hint"])


def test_a_revoked_key_stays_in_the_list_as_such(inside: Inside) -> None:
    id = inside.json("key", "create", "old")["id"]
    assert inside("key", "revoke", id)[1] == f"key {id} (old) was revoked\n"
    assert inside.json("key", "list")[0]["revoked_at"] is not None
    assert "revoked" in inside("key", "list")[1]
    assert inside("key", "revoke", id)[0] == 0


def test_without_keys_the_list_says_what_that_means(inside: Inside) -> None:
    assert inside("key", "list") == (
        0,
        "",
        "no keys: the HTTP API is open to every user of this machine, and only to it\n",
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["create", "x", "--expires-in", "soon"], "--expires-in 'soon' is no duration: write 90s, 5m, 1h or 2d"),
        (["create", "x", "--expires-in", "0d"], "--expires-in 0d is out of range: use 1s to 3650d"),
        (["create", ""], "1 to 100 characters"),
        (["create", "x", "--tenant", "*"], "'*' means all tenants"),
        (["revoke", "nope"], "'nope' is not the id of a key; see: batchwright key list"),
        (["revoke", "01a1e1b4-7c09-7b40-820c-12011338a22d"], "batchwright key list shows them"),
        (["revoke", "laptop"], "'laptop' is no"),
    ],
)
def test_words_that_make_no_sense_are_refused_in_one_line(inside: Inside, arguments, complaint) -> None:
    code, _, err = inside("key", *arguments)
    assert code == 1
    assert err.startswith("error: ")
    assert complaint in err
    assert len(err.splitlines()) == 1
