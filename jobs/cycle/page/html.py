"""The page of a cycle and the index of all, as HTML: one file each that asks for nothing and reads without its script.

The page forbids all that it does not bring itself (Content-Security-Policy, by hashes), so no text on it can run.
"""

import base64
import hashlib
from collections.abc import Callable, Sequence

from jobs.cycle.page import model_sections, sections
from jobs.cycle.page.charts import escaped, number, spark, table
from jobs.cycle.page.data import WITHOUT, CycleRow, PageData
from pipeline.core.format import format_duration, format_share, usd

STYLE = """
:root{color-scheme:light dark;--ink:#1b242e;--quiet:#52606d;--paper:#fff;--soft:#f2f5f8;--line:#d9e0e6;--good:#19703f;
--bad:#b3261e;--now:#0072b2;--before:#6b7785;--holdout:#a3480a;--grid:#e3e8ed;--startup:#9aa5b1;--compile:#cc79a7;
--wait:#e69f00;--work:#009e73;--save:#56b4e9;--judge:#0072b2;--lost:#d55e00}
@media(prefers-color-scheme:dark){:root{--ink:#e6ebf0;--quiet:#aab5c0;--paper:#12171c;--soft:#1c232a;--line:#333e48;
--good:#5fcf8d;--bad:#ff8a80;--now:#6cb8ee;--before:#9aa5b1;--holdout:#f0a868;--grid:#2a333c;--judge:#f0e442}}
*{box-sizing:border-box}
body{font:15px/1.45 system-ui,sans-serif;max-width:1060px;margin:0 auto;padding:1rem;color:var(--ink);
background:var(--paper)}
h1{font-size:1.5rem;margin:.4rem 0}h2{font-size:1.2rem;margin:2.2rem 0 .5rem;border-top:1px solid var(--line);
padding-top:.8rem}h3{font-size:1rem;margin:1.2rem 0 .3rem}
a{color:var(--now)}.skip{position:absolute;left:-999px}.skip:focus{left:1rem;background:var(--paper)}
nav ul{display:flex;flex-wrap:wrap;gap:.2rem 1rem;list-style:none;padding:0;margin:.5rem 0}
.sentence{font-size:1.1rem;margin:.3rem 0 .8rem;overflow-wrap:anywhere}.quiet{color:var(--quiet);margin:.3rem 0}
.chips{display:flex;flex-wrap:wrap;gap:.5rem;margin:0}.chips div{background:var(--soft);padding:.3rem .7rem;
border-radius:6px}dt{font-size:.8rem;color:var(--quiet)}dd{margin:0;font-variant-numeric:tabular-nums}
.failed,.cancelled,.bad{color:var(--bad)}.succeeded{color:var(--good)}.refused{color:var(--holdout)}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:.4rem 0}
th,td{text-align:left;padding:.2rem .8rem .2rem 0;border-bottom:1px solid var(--line);vertical-align:top;
overflow-wrap:break-word;min-width:3.2em;max-width:34em}
th{font-weight:600}.n{text-align:right}th button{all:unset;cursor:pointer}
th button:focus-visible,svg:focus-visible,summary:focus-visible,a:focus-visible{outline:2px solid var(--now)}
pre{background:var(--soft);padding:1rem;overflow-x:auto;font-size:.85rem}summary{cursor:pointer;color:var(--quiet)}
figure{margin:.6rem 0}figcaption{color:var(--quiet);font-size:.9rem}.key span{margin-right:.8rem;white-space:nowrap}
.key i{display:inline-block;width:.8em;height:.8em;margin-right:.3em;border:1px solid var(--quiet)}
svg.chart{display:block;width:100%;height:auto;background:var(--soft)}svg.bar{width:220px;height:14px;
background:var(--soft)}svg.spark{width:170px;height:30px}
svg text{font:11px system-ui,sans-serif;fill:var(--ink)}svg .quiet{fill:var(--quiet)}svg .bad{fill:var(--bad)}
svg .strong{font-weight:600}svg .on{fill:#000;font-weight:600}
path{fill:none}.grid{stroke:var(--grid)}.zero{stroke:var(--quiet)}.edge{stroke:var(--quiet)}
.line{stroke-width:1.6;vector-effect:non-scaling-stroke}.line.now,.now.line{stroke:var(--now)}
.line.before{stroke:var(--before);stroke-dasharray:5 3}.line.holdout{stroke:var(--holdout);stroke-dasharray:2 2}
.mark{stroke:var(--bad);stroke-dasharray:1 3}.deadline{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:6 3}
.whisker{stroke:var(--ink)}.bound{stroke:var(--bad);stroke-dasharray:2 2;stroke-width:1.5}.arrow{fill:var(--ink)}
.dot{stroke:var(--ink);fill:var(--paper);stroke-width:1.4}.dot.pass{fill:var(--good)}.dot.fail{stroke:var(--bad);
stroke-width:2.4}.dot.warn{fill:var(--wait)}
.point.now{fill:var(--now)}.point.before{fill:none;stroke:var(--before);stroke-width:1.5}
.hollow{fill:var(--paper);stroke:var(--now)}
.box rect{fill:var(--paper);stroke:var(--quiet)}.box.good rect{stroke:var(--good);stroke-width:2}
.box.bad rect{stroke:var(--bad);stroke-width:2;stroke-dasharray:5 2}
rect.now,i.now{fill:var(--now);background:var(--now)}i.before{background:var(--before)}i.holdout{background:var(--holdout)}
.s-start-up{fill:var(--startup);background:var(--startup)}.s-compile{fill:var(--compile);background:var(--compile)}
.s-data-wait{fill:var(--wait);background:var(--wait)}.s-productive{fill:var(--work);background:var(--work)}
.s-checkpoint{fill:var(--save);background:var(--save)}.s-evaluation{fill:var(--judge);background:var(--judge)}
.s-wasted{fill:var(--lost);background:var(--lost)}.waiting{fill:var(--paper);stroke:var(--quiet);stroke-width:.6}
.l0{fill:#56b4e9;background:#56b4e9}.l1{fill:#e69f00;background:#e69f00}.l2{fill:#009e73;background:#009e73}
.l3{fill:#cc79a7;background:#cc79a7}.l4{fill:#f0e442;background:#f0e442}.l5{fill:#0072b2;background:#0072b2}
.l6{fill:#d55e00;background:#d55e00}.l7{fill:#999;background:#999}
.v-pass{fill:#8fd0ae}.v-warn{fill:#f3c969}.v-retry{fill:#ee9a6a}.v-fix{fill:#f08f86}.v-none{fill:var(--soft)}
.rule{stroke:var(--paper)}.cross{stroke:var(--ink);stroke-width:.8;pointer-events:none}
#tip{position:fixed;left:0;top:0;background:var(--ink);color:var(--paper);padding:.2rem .5rem;border-radius:4px;
font-size:.85rem;pointer-events:none;max-width:30rem}
@media print{nav,.skip,#tip{display:none}body{max-width:none;color:#000;background:#fff}
svg.chart,svg.bar{background:none}details::details-content{content-visibility:visible;display:block}h2{break-after:avoid}figure{break-inside:avoid}
rect[class^=s-],rect[class^=l]{fill:none;stroke:#000;stroke-width:.6}}
"""
SCRIPT = """
(()=>{const tip=document.createElement('div');tip.id='tip';tip.hidden=true;tip.setAttribute('role','status');
document.body.append(tip);
const fmt=v=>Math.abs(v)>=1000?Math.round(v).toLocaleString('en'):String(+v.toPrecision(5));
const near=(a,x)=>{let l=0,h=a.length-1;while(h-l>1){const m=l+h>>1;a[m][0]<x?l=m:h=m}
return h>0&&Math.abs(a[h][0]-x)<Math.abs(a[l][0]-x)?h:l};
const show=(x,y,text)=>{tip.textContent=text;tip.hidden=false;
tip.style.transform=`translate(${Math.max(0,Math.min(x+14,innerWidth-tip.offsetWidth-4))}px,${Math.max(0,y-38)}px)`};
for(const s of document.querySelectorAll('svg.lines')){
const W=s.viewBox.baseVal.width,[x0,x1,a,b,y0,y1,c,d]=s.dataset.frame.split(' ').map(Number);
const lines=[...s.querySelectorAll('path.line')].reverse().map(p=>{let x=0,y=0;
return [p.dataset.name,p.getAttribute('d').match(/-?[0-9]+/g).map(Number).reduce((o,v,i,all)=>{
if(i%2){x+=all[i-1];y+=v;o.push([x/10,y/10])}return o},[])]});
const cross=document.createElementNS(s.namespaceURI,'path');cross.setAttribute('class','cross');s.append(cross);
let at=0;const own=lines[0][1];
const point=(i,cx,cy)=>{at=Math.max(0,Math.min(own.length-1,i));const px=own[at][0];
cross.setAttribute('d',`M${px} ${d}V${c}`);
const words=lines.map(([n,p])=>{const q=p[near(p,px)];return `${n} ${fmt(y0+(c-q[1])/(c-d)*(y1-y0))}`});
const r=s.getBoundingClientRect();const k=r.width/W;
show(cx??r.left+px*k,cy??r.top+own[at][1]*k,`step ${fmt(Math.round(x0+(px-a)/(b-a)*(x1-x0)))}: ${words.join(', ')}`)};
s.addEventListener('pointermove',e=>{const r=s.getBoundingClientRect();
point(near(own,(e.clientX-r.left)/r.width*W),e.clientX,e.clientY)});
s.addEventListener('pointerleave',()=>{tip.hidden=true;cross.removeAttribute('d')});
s.addEventListener('blur',()=>{tip.hidden=true;cross.removeAttribute('d')});
s.addEventListener('keydown',e=>{const go={ArrowRight:1,ArrowLeft:-1,PageDown:20,PageUp:-20,Home:-1e9,End:1e9}[e.key];
if(go){e.preventDefault();point(at+go)}if(e.key=='Escape')tip.hidden=true})}
const value=t=>{const m=t.replace(/,/g,'').match(/-?[0-9.]+(e-?[0-9]+)?/);return m?+m[0]:NaN};
for(const h of document.querySelectorAll('thead th')){const b=document.createElement('button');
b.type='button';b.textContent=h.textContent;h.replaceChildren(b);
b.addEventListener('click',()=>{const i=[...h.parentNode.children].indexOf(h),t=h.closest('table').tBodies[0];
const up=h.getAttribute('aria-sort')!='ascending';for(const o of h.parentNode.children)o.removeAttribute('aria-sort');
h.setAttribute('aria-sort',up?'ascending':'descending');const sign=up?1:-1,n=h.classList.contains('n');
t.append(...[...t.rows].sort((p,q)=>{const l=p.cells[i].textContent,r=q.cells[i].textContent;
return sign*(n?(value(l)-value(r)||0):l.localeCompare(r,undefined,{numeric:true}))}))})}
addEventListener('keydown',e=>{if(e.ctrlKey||e.metaKey||e.altKey||!['j','k'].includes(e.key))return;
const all=[...document.querySelectorAll('section')],y=scrollY+8;
const to=e.key=='j'?all.find(o=>o.offsetTop>y+8):all.reverse().find(o=>o.offsetTop<y-16);
if(to){to.scrollIntoView();to.querySelector('h2').focus()}});
addEventListener('beforeprint',()=>{for(const o of document.querySelectorAll('details'))o.open=true})})()
"""


def page(data: PageData, own: CycleRow) -> str:
    """The page of a cycle; `own`: its line in the index."""
    shown = {
        "What happened": sections.jobs_section(data),
        "What it cost": sections.cost_section(data),
        "May it be promoted": model_sections.gate_section(data),
        "Did it learn": model_sections.training_section(data),
        "Can its scores be trusted": model_sections.calibration_section(data),
        "What is it wrong about": model_sections.errors_section(data),
        "Does it find": model_sections.retrieval_section(data),
        "Vectors": model_sections.vectors_section(data),
        "Data": model_sections.data_section(data),
        "Machines": sections.machines_section(data),
        "From what to what": sections.lineage_section(data),
        "Trend": sections.trend_section(data, own),
        "Everything else": sections.details_section(data),
    }
    links, body = "", ""
    for title, part in shown.items():
        if part:
            name = title.lower().replace(" ", "-")
            links += f'<li><a href="#{name}">{title}</a></li>'
            body += (
                f'<section id="{name}" aria-labelledby="h-{name}">'
                f'<h2 id="h-{name}" tabindex="-1">{title}</h2>{part}</section>'
            )
    top = (
        f'<header>{sections.banner(data)}</header><nav aria-label="Sections"><ul>'
        f'<li><a href="index.html">All cycles</a></li><li><a href="{escaped(data.cycle)}.json">As JSON</a></li>{links}'
        "</ul></nav>"
    )
    return _document(f"Cycle {data.cycle}: {data.outcome}", f'{top}<main id="main">{body}</main>')


def index(rows: Sequence[CycleRow]) -> str:
    """All cycles, the newest first; `rows`: the oldest first."""
    lines = []
    for row in reversed(rows):
        lines.append(
            (
                f'<a href="{escaped(row.cycle)}.html">{escaped(row.cycle)}</a>',
                f'<span class="{row.outcome}">{"under way" if row.outcome == "open" else row.outcome}</span>',
                escaped(f"promoted{WITHOUT if row.without_comparison else ''}" if row.promoted else row.reason or "-"),
                sections.stamp(row.claimed_at),
                escaped(f"{row.metric} {number(row.value)}" if row.metric else "-"),
                format_duration(row.took_s),
                usd(row.usd),
                format_share(row.goodput),
                number(row.rows),
            )
        )
    head = ("cycle", "outcome", "why", "submitted", "metric", "took", "cost", "goodput", "rows")
    recent = rows[-20:]
    metric = next((row.metric for row in reversed(recent) if row.metric), "")
    figures: dict[str, Callable[[CycleRow], float | None]] = {
        **({metric: lambda row: row.value_of(metric)} if metric else {}),
        "cost": lambda row: row.usd,
        "took, s": lambda row: row.took_s,
        "goodput": lambda row: row.goodput,
    }
    drawn = [
        (name, spark([(value(row), row.promoted, f"{row.cycle}: {number(value(row))}") for row in recent], name))
        for name, value in figures.items()
    ]
    trends = table((), [one for one in drawn if one[1]], raw={1}) if len(recent) > 1 else ""
    listed = table(head, lines, range(5, 9), raw=range(9))
    return _document("Cycles", f'<header><h1>Cycles</h1></header><main id="main">{trends}{listed}</main>')


def _document(title: str, body: str) -> str:
    policy = (
        f"default-src 'none'; style-src '{_hash(STYLE)}'; script-src '{_hash(SCRIPT)}'; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><title>{escaped(title)}</title>'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style>'
    )
    skip = '<a class="skip" href="#main">Skip to the content</a>'
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body>{skip}{body}<script>{SCRIPT}</script></body></html>\n'
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
