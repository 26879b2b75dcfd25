"""An ablation as numbers, words, tables, figures and pages: reads runs, never starts one.

How a study becomes a verdict, and then a page; each step has what the one before made::

    study        the plan as plain data, its arms, rules and runs: what the ledger hands over
    comparisons  differences of two arms by seed, their analyses (sequential), claims and verdict; what to run next
    analysis     all comparisons by each metric, beside them what run folders tell (predictions, variance, configs);
                 a line for each arm: which kind of verdict, and whether it holds on new images
    wording      what a line says, the answer, what to do now, and what to know beside it
    report       these with facts and checks, tables and the figure: made once ...
    page         ... and written as report.html, report.md and data; dashboard shows it in W&B

Before the first result ``forecast`` says what the plan can show. Imports storage, config and figures.
"""
