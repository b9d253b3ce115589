"""`exclude`: what people keep batches from deleting, who, until when and why."""

from datetime import timedelta

import pytest

from forgekeeper.audit.acts import Act
from forgekeeper.platform.database.exclusions import Exclusion
from tests.harness.excluding import exclude, groups
from tests.harness.thorough import whole_only

pytestmark = pytest.mark.usefixtures("database")

BY_PROJECT = ["git_ref_cleanup", "expired_job_artifacts", "delete_objects"]
BY_NAME = [*BY_PROJECT, "stale_direct_uploads", "stale_imports"]
HOW = "write project:7, group:9 or 'pattern:uploads/*'"
WRONG = {
    "7": f"cannot exclude '7': {HOW}",
    "user:7": f"cannot exclude 'user:7': {HOW}",
    "project:": f"cannot exclude 'project:': {HOW}",
    "project:seven": "'seven' is not the number of a project: write project:7",
    "group:-1": "'-1' is not the number of a group: write group:7",
    "project:9999999999999999999": "'9999999999999999999' is not the number of a project: write project:7",
    "project:7 --batch user_status_cleanup": (
        "project:7 would exclude nothing: no record of user_status_cleanup has a project"
    ),
    "pattern:* --batch user_status_cleanup": (
        "pattern:* would exclude nothing: no record of user_status_cleanup has a name"
    ),
    "project:7 --batch stale_imports": "project:7 would exclude nothing: no record of stale_imports has a project",
}


@whole_only
@pytest.mark.parametrize(
    ("what", "reached"),
    [("project:7", BY_PROJECT), ("pattern:a*b", BY_NAME), ("pattern:a,b --batch stale_imports", ["stale_imports"])],
)
def test_an_exclusion_says_which_batches_it_reaches_and_is_in_the_list_and_the_audit(main, what, reached):
    added = main(
        "exclude", "add", *what.split(), "--reason", "a trial", "--until", "2099-01-01", "--json", ACTOR="erika"
    )

    listed = main("exclude", "list", "--json").json["exclusions"]
    assert added.json["reaches"] == reached
    assert listed == [{name: value for name, value in added.json.items() if name != "reaches"}]
    act = Act.select().get()
    assert (act.act, act.what, act.actor, act.reason) == ("exclude add", what.split()[0], "erika", "a trial")
    assert act.after["until"] == "2099-01-01 00:00:00+00:00"


@pytest.mark.parametrize("which", ["1", "project:7"])
def test_what_is_excluded_is_so_until_it_is_removed_and_the_audit_has_why(main, which):
    main("exclude", "add", "project:7", "--reason", "a trial")
    story = main("why", "expired_job_artifacts").stdout

    removed = main("exclude", "remove", which, "--reason", "over")

    assert "project:7 is excluded by " in story
    assert (removed.status, removed.stdout) == (0, "no longer excluded: project:7 (exclusion 1)\n")
    assert not Exclusion.select().exists()
    assert [(act.act, act.what, act.reason) for act in Act.select().order_by(Act.id)][1:] == [
        ("exclude remove", "project:7", "over")
    ]
    again = main("exclude", "remove", which, "--reason", "over")
    assert (again.status, again.complaint) == (
        1,
        f"there is no exclusion {which}; `forgekeeper exclude list` lists the exclusions",
    )


@pytest.mark.parametrize("what", WRONG)
def test_what_could_exclude_nothing_is_refused(main, what):
    result = main("exclude", "add", *what.split(), "--reason", "a trial")

    assert (result.status, result.complaint) == (2, WRONG[what])


def test_an_end_that_has_passed_and_an_empty_reason_are_refused(main):
    late = main("exclude", "add", "project:7", "--reason", "a trial", "--until", "2020-01-01")
    silent = main("exclude", "add", "project:7", "--reason", " ")

    assert (late.status, late.complaint) == (2, "2020-01-01 00:00:00 has passed; give a future time, in UTC")
    assert (silent.status, silent.complaint) == (2, "give a --reason, for the audit")
    assert not Exclusion.select().exists()


def test_a_group_is_refused_until_the_forge_says_which_projects_it_has(main):
    refused = main("exclude", "add", "group:9", "--reason", "a trial")
    with groups((7, 9)):
        added = main("exclude", "add", "group:9", "--reason", "a trial", "--json")

    assert (refused.status, refused.complaint) == (
        1,
        (
            "no group can be excluded: the database lacks project_groups (project_id, group_id), with a row for each"
            " project and each of its groups; create that table or view (docs/exclusions.md)"
        ),
    )
    assert added.json["reaches"] == BY_PROJECT


def test_what_has_ended_is_not_listed(main):
    exclude("project:7", ended=timedelta(0))

    assert main("exclude", "list", "--json").json == {"exclusions": []}
