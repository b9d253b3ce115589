"""Every page of the console answers, on an empty installation too."""


def test_the_first_page_names_every_batch(seen):
    answer = seen("/")

    assert answer.status == 200
    assert "user_status_cleanup" in answer.text
