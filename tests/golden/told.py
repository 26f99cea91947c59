"""What a report tells and draws, without the points of its lines: what a golden journal expects."""

from typing import Any

from robust_train.report.charts import LANES, Chart, curve_charts, memory_charts
from robust_train.report.facts import Story, speed_of


def told(story: Story) -> dict[str, Any]:
    """Return the words, the marks and the figures of a story."""
    return {
        "status": story.status,
        "sentence": story.sentence,
        "seconds": {use: round(seconds, 2) for use, seconds in story.seconds.items()},
        "spans": [f"{s.use} {s.seconds:.2f} {s.attempt}" for s in story.spans],
        "attempts": [
            {
                "number": a.number,
                "device": a.device,
                "ranks": a.spec.ranks,
                "batch": a.batch_size,
                "micro_batch": a.micro_batch,
                "accumulation": a.spec.gradient_accumulation_steps,
                "outcome": a.outcome,
                "message": a.message,
                "action": a.action,
                "reason": a.reason,
                "steps": [a.start_step, a.end_step],
                "has_traceback": a.traceback is not None,
                "ranks_with_speed": len(speed_of(a)),
            }
            for a in story.attempts
        ],
        "marks": [f"{mark.kind} {mark.attempt}: {mark.text}" for mark in story.marks],
        "curves": [
            f"{c.name} {c.attempt}: {c.points[0][0]} to {c.points[-1][0]}{' lost' * c.lost}"
            for c in story.curves
        ],
        "memory": [m.device for m in story.memory],
        "advice": [[advice.finding, *advice.steps, advice.overrides] for advice in story.advice],
        "gaps": list(story.gaps),
        "charts": [_chart(chart) for chart in (*memory_charts(story), *curve_charts(story))],
    }


def _chart(chart: Chart) -> dict[str, Any]:
    return {
        "caption": chart.caption,
        "legend": [text for _, text in chart.legend],
        "lines": [line.name for line in chart.plot.lines],
        "bands": [band.label for band in chart.plot.bands],
        "lanes": {
            LANES[kind]: [text for _, text in entries] for kind, entries in chart.lanes.items()
        },
    }
