"""In the launcher, writes the report page of an ended job, and completes its summary."""

from __future__ import annotations

from dataclasses import replace

from robust_train.folder.state import Summary
from robust_train.launcher.hooks import InLauncher, compute_or_warn
from robust_train.report import wording
from robust_train.report.html import write_report
from robust_train.report.sources import read_sources
from robust_train.report.story import goodput_from


class ReportPage(InLauncher):
    """Reads the job's record once, for the summary and for the page."""

    def end(self, summary: Summary) -> Summary:
        """Add goodput and advice to the summary, and write the page that shows both.

        A figure that cannot be computed is left out.
        """
        words = self.job.plan.words
        sources = compute_or_warn("the record", lambda: read_sources(summary.run_dir))
        if sources is None:
            return summary
        speed_advice = compute_or_warn(
            "advice", lambda: tuple(wording.speed_advice(summary.attempts))
        )
        goodput = compute_or_warn("goodput", lambda: goodput_from(sources))
        advice = (*summary.advice, *map(words.reword, speed_advice or ()))
        summary = replace(summary, goodput=goodput, advice=advice)
        write_report(replace(sources, summary=summary))
        return summary
