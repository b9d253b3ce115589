"""New sample data that becomes due: references are asked of projects that have a repository."""

import pytest

from demo.sample_data import add_projects, create_repository, list_refs
from demo.traffic import PROJECTS_PER_MINUTE, REFS_PER_PROJECT, add_traffic
from models import GitRefDeletion, UserStatus
from tests.harness.settings import settings_with

ROUNDS = 8


@pytest.mark.usefixtures("database")
def test_a_project_whose_repository_was_never_created_is_asked_for_nothing(tmp_path):
    never_created, *created = add_projects(PROJECTS_PER_MINUTE + 1).items()
    for _project, path in created:
        create_repository(tmp_path, path, [])

    for _round in range(ROUNDS):
        add_traffic(settings_with(repositories_root=tmp_path))

    asked = {row.project_id for row in GitRefDeletion.select_pending()}
    assert (asked, never_created[0] in asked) == ({project for project, _path in created}, False)
    assert {len(list_refs(tmp_path / path)) for _project, path in created} == {1 + ROUNDS * REFS_PER_PROJECT}
    assert UserStatus.select().exists()
