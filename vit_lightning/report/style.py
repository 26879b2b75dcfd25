"""Colours, letters and tables that all of our HTML pages share."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which the colour-blind can tell apart; after six they repeat with other lines and points."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fff; --faint: #666; --line: #d5d5d5; --wash: #f5f5f2;
  --link: #0050a0; --bad: #b00020; --good: #00704f; --less: #b04a00; --same: #0060a0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #161616; --faint: #a3a3a3; --line: #3b3b3b;
  --wash: #262626; --link: #8ab8ff; --bad: #ff8a80; --good: #4fd1a5; --less: #ff9d5c; --same: #7cc0ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 70rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.15rem; font-weight: 600; color: var(--faint); margin: 0 0 .3rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
a { color: var(--link); }
.note, figcaption { color: var(--faint); font-size: .86rem; }
.bad { color: var(--bad); font-weight: 600; }
ul { padding-left: 1.2rem; }
.wide { overflow-x: auto; margin: 1rem 0 .3rem;
  background: linear-gradient(to left, var(--paper) 2rem, transparent) right,
  linear-gradient(to left, var(--faint), transparent) right; background-size: 3rem 100%, 1rem 100%;
  background-repeat: no-repeat; background-attachment: local, scroll; } /* a shadow where a table goes on */
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 0 0 .3rem; }
th, td { padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
  overflow-wrap: normal; }
thead th { font-weight: 500; color: var(--faint); } tbody th { font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .9rem; margin: .5rem 0; }
dt { color: var(--faint); } dd { margin: 0; }
details { margin: 1rem 0; } summary { cursor: pointer; font-weight: 600; }
code { background: var(--wash); padding: .1em .3em; font-size: .86em; }
"""
