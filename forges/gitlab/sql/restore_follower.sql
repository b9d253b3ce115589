
        insert into TABLES.FOLLOWER_TABLE
        select follower.* from pg_catalog.jsonb_populate_recordset(
            null::TABLES.FOLLOWER_TABLE, nullif(destroyed->'FOLLOWER_TABLE', 'null')
        ) as follower;
