"""Grafana's dashboards as code: `python -m dashboards` writes them into `deploy/grafana/dashboards/`.

Needed by those who change them, never by the installed product, whose wheel leaves this out.
"""
