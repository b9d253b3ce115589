# Write the ACL file with the passwords of the environment, and start Redis.
set -eu
umask 077
sed -e "s/>SCHEDULER_PASSWORD/>$SCHEDULER_PASSWORD/" \
    -e "s/>WORKER_PASSWORD/>$WORKER_PASSWORD/" \
    -e "s/>EXPORTER_PASSWORD/>$EXPORTER_PASSWORD/" \
    -e "s/>CONSOLE_PASSWORD/>$CONSOLE_PASSWORD/" \
    -e "s/>PERSON_PASSWORD/>$PERSON_PASSWORD/" \
    /etc/redis/users.acl >/tmp/users.acl
exec redis-server /etc/redis/redis.conf
