"""Write the numbers of results.json into README.md, between its two markers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}g}"


def verdict(row: dict[str, Any]) -> str:
    most, least = row["bar"]
    parts = []
    if most is not None and row.get("limit"):
        parts.append(f"limit {'met' if row['over_limit'] <= most else 'missed'} (≤ {most})")
    if least is not None:
        parts.append(f"plain {'met' if 1 / row['over_plain'] >= least else 'missed'} (≥ {least})")
    return ", ".join(parts) or "–"


def lines(results: dict[str, Any]) -> list[str]:
    out = [
        "| work | ours, s per round | limit | plain loop | ours / limit | plain / ours | by processor time: ours / limit, plain / ours | MB | start-up, s | bar |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in sorted(results.items()):
        if not isinstance(row, dict) or "ours" not in row:
            continue
        cpu = row["cpu"]
        by = f"{number(cpu['ours'] / cpu['limit'] if cpu.get('limit') else None)}, {number(cpu['plain'] / cpu['ours'])}"
        compiled = f" (compiled in {row['compile_seconds']:.0f} s)" if "compile_seconds" in row else ""
        out.append(
            f"| ({name}) {row['about']}{compiled} | {number(row['ours'])} | {number(row['limit'])} | {number(row['plain'])} "
            f"| {number(row.get('over_limit'))} | {number(1 / row['over_plain'])} | {by} | {number(row['rss_mb'], 4)} "
            f"| {number(row['startup'])} | {verdict(row)} |"
        )
    peers = [
        (name, peer, found)
        for name, row in results.items()
        if isinstance(row, dict)
        for peer, found in row.get("peers", {}).items()
    ]
    if peers:
        out += [
            "",
            "| work | simulator | s per round | ours in the same turns | start-up, s | MB |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for name, peer, found in peers:
            if "seconds" in found:
                out.append(
                    f"| ({name}) | {peer} | {number(found['seconds'])} | {number(found['ours'])} | {number(found['startup'])} "
                    f"| {number(found['rss_mb'], 4)} |"
                )
            else:
                out.append(f"| ({name}) | {peer} | {found['trouble']} | | | |")
    return out


def write(results: dict[str, Any]) -> None:
    path = HERE / "README.md"
    text = path.read_text(encoding="utf-8") if path.exists() else f"{BEGIN}\n{END}\n"
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    m = results.get("machine", {})
    about = ", ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in m.items())
    body = "\n".join([*lines(results), "", f"Machine: {about} (load: other programs' at the start)."])
    path.write_text(f"{head}{BEGIN}\n{body}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    write(json.loads((HERE / "results.json").read_text()))
