create or replace view VIEWS.user_statuses as
select user_id, emoji, message, message_html, availability, clear_status_at from TABLES.user_statuses;
