# Migrate, and grant each role the rights of its process.  With the argument `sample`, also add sample data.
# The services `migrate` and `sample` of compose.yaml run this as the owner of the tables.
set -eu
forgekeeper migrate
if [ "${1:-}" = sample ]; then
    forgekeeper seed
fi
# After the sample data, because its tables need grants too.
forgekeeper grants --all
if [ "${1:-}" = sample ]; then
    forgekeeper check --init
fi
