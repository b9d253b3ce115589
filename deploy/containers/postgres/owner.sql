-- Create the owner of the tables, and hand it the database, so that it may create schemas.
\getenv owner_password OWNER_PASSWORD
create role forge_owner login password :'owner_password';
alter database :"DBNAME" owner to forge_owner;
