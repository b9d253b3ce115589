-- Create the roles of forgekeeper's processes, with the passwords of the environment (`.env`).
-- PostgreSQL's image runs this at its first start, in the database POSTGRES_DB.
\getenv scheduler_password SCHEDULER_PASSWORD
\getenv worker_password WORKER_PASSWORD
\getenv exporter_password EXPORTER_PASSWORD
\getenv console_password CONSOLE_PASSWORD
\getenv person_password PERSON_PASSWORD
create role forgekeeper_scheduler login password :'scheduler_password';
create role forgekeeper_worker login password :'worker_password';
create role forgekeeper_exporter login password :'exporter_password';
create role forgekeeper_console login password :'console_password';
create role forgekeeper login password :'person_password';
