"""What a database or role sets for its sessions changes nothing of what ours do."""

ODD = {
    "standard_conforming_strings": "off",
    "escape_string_warning": "off",
    "backslash_quote": "on",
    "bytea_output": "escape",
    "intervalstyle": "iso_8601",
    "datestyle": "German",
    "timezone": "Pacific/Kiritimati",
    "extra_float_digits": "-15",
    "quote_all_identifiers": "on",
    "transform_null_equals": "on",
    "array_nulls": "off",
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
    "xmloption": "document",
    "jit": "on",
    "enable_seqscan": "off",
    "plan_cache_mode": "force_generic_plan",
    "constraint_exclusion": "on",
    "row_security": "off",
    "check_function_bodies": "off",
}
RUNS = ("user_status_cleanup", "stale_imports", "expired_job_artifacts", "prune")


def test_every_batch_does_the_same_whatever_the_database_sets(main, own_database, query):
    ((name,),) = query(own_database, "select quote_ident(current_database())")
    done = []
    main("flags", "on", "bulk_delete_job_artifacts", DATABASE_URL=own_database)
    for odd in ({}, {}, ODD):
        for key, value in odd.items():
            query(own_database, f"alter database {name} set {key} = '{value}'")
        checked = main("check", "--json", DATABASE_URL=own_database).json["findings"]
        main("seed", DATABASE_URL=own_database)
        results = [main("run", batch, "--json", DATABASE_URL=own_database).json | {"run": None} for batch in RUNS]
        done.append((results, [one for one in checked if one["level"] == "error"]))

    assert done[1] == done[2]
