"""What dashboards are made of: queries, panels, rows, and how they are put together.

Every panel says in its description how to read it, and every query goes to the data source
that the reader has chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from grafana_foundation_sdk.builders import common as common_builder
from grafana_foundation_sdk.builders import dashboard as board
from grafana_foundation_sdk.builders import heatmap, stat, table, timeseries
from grafana_foundation_sdk.builders import prometheus as prometheus_builder
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common, dashboard, prometheus

SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH = 24
"""Columns of Grafana's grid."""
HEIGHT = 8
GOOD, WARN, BAD = "green", "orange", "red"

Kind = TypeVar("Kind", timeseries.Panel, stat.Panel, table.Panel, heatmap.Panel)


class Query(NamedTuple):
    """An expression, and the name of its series: a template of labels."""

    expr: str
    legend: str = ""


class Column(NamedTuple):
    """A column of a table: its name, its expression, and how its cells look."""

    name: str
    expr: str
    unit: str = "short"
    steps: Mapping[float, str] | None = None


class Row(NamedTuple):
    """Panels under a title: the question that they answer.  A *folded* one is opened by who needs it."""

    title: str
    panels: Sequence[Builder[dashboard.Panel]]
    folded: bool = False


def graph(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    lines: Iterable[float] = (),
    stacked: bool = False,
    columns: int = WIDTH // 3,
) -> timeseries.Panel:
    """Show values over time; *lines* are drawn dashed where it gets serious."""
    panel = (
        timeseries.Panel()
        .color_scheme(_colours(dashboard.FieldColorModeId.PALETTE_CLASSIC))
        .min(0)
        .fill_opacity(20 if stacked else 0)
        .show_points(common.VisibilityMode.NEVER)
    )
    panel.legend(
        common_builder.VizLegendOptions()
        .show_legend(show_legend=True)
        .display_mode(common.LegendDisplayMode.LIST)
        .placement(common.LegendPlacement.BOTTOM)
    ).tooltip(
        common_builder.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
    )
    if stacked:
        panel.stacking(common_builder.StackingConfig().mode(common.StackingMode.NORMAL))
    if lines:
        dashed = common_builder.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        panel.thresholds(_steps(dict.fromkeys(lines, BAD), "transparent")).thresholds_style(dashed)
    return _furnish(panel, title, description, queries, unit=unit, columns=columns)


def figure(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    steps: Mapping[float, str] | None = None,
    first: str = GOOD,
    nothing: str = "none",
) -> stat.Panel:
    """Show the present value large, in the colour of the step that it has reached; *nothing* is said of no series."""
    panel = stat.Panel().color_scheme(_colours(dashboard.FieldColorModeId.THRESHOLDS))
    panel.thresholds(_steps(steps or {}, first)).no_value(nothing)
    panel.graph_mode(common.BigValueGraphMode.NONE).color_mode(common.BigValueColorMode.VALUE)
    panel.reduce_options(common_builder.ReduceDataOptions().calcs(["lastNotNull"]))
    return _furnish(panel, title, description, queries, unit=unit, columns=WIDTH // 6, now=True, height=HEIGHT // 2)


def distribution(title: str, description: str, unit: str, query: Query) -> heatmap.Panel:
    """Show a histogram's buckets over time."""
    panel = heatmap.Panel().calculate(calculate=False).y_axis(heatmap.YAxisConfig().unit(unit))
    form = prometheus.PromQueryFormat.HEATMAP
    return _furnish(panel, title, description, [query], unit=unit, columns=WIDTH // 2, form=form)


def listing(
    title: str, description: str, expr: str, *, names: Mapping[str, str], links: Mapping[str, str]
) -> table.Panel:
    """List the labels of the series of one query, under *names* and in their order; *links* lead on from a column."""
    shown = table.Panel().no_value("nothing")
    _link(shown, links)
    organize = {
        "excludeByName": {"Time": True, "Value": True},
        "renameByName": dict(names),
        "indexByName": {label: place for place, label in enumerate(names)},
    }
    shown.with_transformation(dashboard.DataTransformerConfig("organize", options=organize))
    form = prometheus.PromQueryFormat.TABLE
    return _furnish(shown, title, description, [Query(expr)], unit="short", columns=WIDTH // 2, now=True, form=form)


def comparison(
    title: str, description: str, label: str, columns: Sequence[Column], *, links: Mapping[str, str]
) -> table.Panel:
    """Show a line for each value of *label*, a column for each expression."""
    shown = table.Panel().color_scheme(_colours(dashboard.FieldColorModeId.THRESHOLDS))
    _link(shown, links)
    values = [f"Value #{_letter(place)}" for place in range(len(columns))]
    # Each query brings the time of its answer as well, and those may differ.
    wanted = {"include": {"names": [label, *values]}}
    join = {"byField": label, "mode": "outer"}
    organize = {
        "excludeByName": {},
        "renameByName": dict(zip(values, (column.name for column in columns), strict=True)),
        "indexByName": {label: 0, **{value: place for place, value in enumerate(values, 1)}},
    }
    for name, options in (("filterFieldsByName", wanted), ("joinByField", join), ("organize", organize)):
        shown.with_transformation(dashboard.DataTransformerConfig(name, options=options))
    for column in columns:
        shown.override_by_name(column.name, _look(column))
    queries = [Query(column.expr) for column in columns]
    form = prometheus.PromQueryFormat.TABLE
    return _furnish(
        shown, title, description, queries, unit="short", columns=WIDTH, now=True, form=form, height=HEIGHT + 3
    )


def put_together(
    uid: str,
    title: str,
    description: str,
    rows: Sequence[Row],
    *,
    variables: Sequence[Builder[dashboard.VariableModel]] = (),
    annotations: Sequence[Builder[dashboard.AnnotationQuery]] = (),
) -> dashboard.Dashboard:
    """Make a dashboard that nobody edits in the browser; its panels are numbered in their order."""
    made = board.Dashboard(title).uid(uid).description(description).tags(["forgekeeper"]).readonly()
    made.time("now-6h", "now").refresh("1m").timezone("browser").tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
    others = board.DashboardLink("forgekeeper").type(dashboard.DashboardLinkType.DASHBOARDS).tags(["forgekeeper"])
    made.link(others.keep_time(keep_time=True))
    made.with_variable(
        board.DatasourceVariable("datasource")
        .label("Data source")
        .description("The Prometheus that scrapes forgekeeper and evaluates its rules.")
        .type("prometheus")
    )
    for variable in variables:
        made.with_variable(variable)
    for annotation in annotations:
        made.annotation(annotation)
    for row in rows:
        _add(made, row)
    return _numbered(made.build())


def annotation(
    name: str, query: Query, *, colour: str, text: str, value_is_time: bool = False
) -> board.AnnotationQuery:
    """Mark instants in every graph: where the query answers, or at the milliseconds that its value is."""
    target = prometheus_builder.Dataquery().expr(query.expr).interval("60s").ref_id("Anno").range()
    made = board.AnnotationQuery().name(name).datasource(SOURCE).enable(enable=True).icon_color(colour)
    made.target(target.datasource(SOURCE).legend_format(query.legend)).title_format(query.legend).text_format(text)
    return made.use_value_for_time(use_value_for_time=True) if value_is_time else made


def choice(name: str, label: str, description: str, values: Sequence[str]) -> board.CustomVariable:
    """Let the reader choose one of *values*, which no query can add to."""
    options = [dashboard.VariableOption(selected=value == values[0], text=value, value=value) for value in values]
    made = board.CustomVariable(name).label(label).description(description).values(",".join(values))
    return made.options(options).current(options[0]).allow_custom_value(allow_custom_value=False)


def _furnish(
    panel: Kind,
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str,
    columns: int,
    now: bool = False,
    form: prometheus.PromQueryFormat = prometheus.PromQueryFormat.TIME_SERIES,
    height: int = HEIGHT,
) -> Kind:
    """Give a panel what every one has; *now* asks for the present instant alone."""
    panel.title(title).description(description).unit(unit).datasource(SOURCE).span(columns).height(height)
    for place, query in enumerate(queries):
        target = prometheus_builder.Dataquery().expr(query.expr).legend_format(query.legend or "__auto")
        target.ref_id(_letter(place)).datasource(SOURCE).format(form)
        panel.with_target(target.instant() if now else target.range())
    return panel


def _colours(mode: dashboard.FieldColorModeId) -> board.FieldColor:
    return board.FieldColor().mode(mode)


def _letter(place: int) -> str:
    return chr(ord("A") + place)


def _steps(steps: Mapping[float, str], first: str) -> board.ThresholdsConfig:
    found = [dashboard.Threshold(value=None, color=first)]
    found += [dashboard.Threshold(value=float(value), color=colour) for value, colour in sorted(steps.items())]
    return board.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(found)


def _look(column: Column) -> list[dashboard.DynamicConfigValue]:
    look = [dashboard.DynamicConfigValue("unit", column.unit)]
    if column.steps is not None:
        look.append(dashboard.DynamicConfigValue("thresholds", _steps(column.steps, GOOD).build()))
        look.append(dashboard.DynamicConfigValue("custom.cellOptions", {"type": "color-text"}))
    return look


def _link(shown: table.Panel, links: Mapping[str, str]) -> None:
    for column, url in links.items():
        link = {"title": "${__value.text}", "url": url}
        shown.override_by_name(column, [dashboard.DynamicConfigValue("links", [link])])


def _add(made: board.Dashboard, row: Row) -> None:
    titled = board.Row(row.title)
    if row.folded:
        # Only of a folded row Grafana reads the panels inside it.
        for panel in row.panels:
            titled.with_panel(panel)
        made.with_row(titled)
        return
    made.with_row(titled)
    for panel in row.panels:
        made.with_panel(panel)


def _numbered(made: dashboard.Dashboard) -> dashboard.Dashboard:
    number = 0
    for outer in made.panels or []:
        for panel in (outer, *(outer.panels if isinstance(outer, dashboard.RowPanel) else ())):
            number += 1
            panel.id_val = number
    return made
