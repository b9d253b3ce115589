"""Arrays reach PostgreSQL as they are, though they are sent as text."""

from forgekeeper.platform.database.arrays import format_array

TEXTS = ["refs/mr/7", "", "NULL", None, 'a "b"', "a\\", "{a,b}", " ", "line\nline", "日本語 🦊"]


def test_each_text_of_an_array_arrives(database):
    assert database.execute_sql("select %s::text[]", (format_array(TEXTS),)).fetchone() == (TEXTS,)
