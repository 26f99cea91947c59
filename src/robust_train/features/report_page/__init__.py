"""The report page of a job, its goodput, and advice on its speed."""

from robust_train.model.feature import Feature

FEATURE = Feature("report_page", launcher=f"{__name__}.launcher:ReportPage")
