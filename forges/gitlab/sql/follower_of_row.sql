,
    (
        select jsonb_agg(to_jsonb(follower)) from TABLES.FOLLOWER_TABLE as follower
        where follower.FOLLOWS_BY = artifact.id and follower.partition_id = artifact.partition_id
    ) as FOLLOWER_TABLE
