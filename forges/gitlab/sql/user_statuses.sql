create or replace view VIEWS.user_statuses as
select user_id, emoji, message, message_html, availability, clear_status_at from TABLES.user_statuses;

-- Who locks a row needs the right to update it; nothing else is done with that right.
create or replace trigger refuse instead of update on VIEWS.user_statuses
    for each row execute function VIEWS.refuse_update();
