python3 - <<'PY'
import json

rows = [line.split() for line in open("access.log") if line.strip() and not line.startswith("#")]
sizes = {}
for row in rows:
    if int(row[3]) < 400:
        sizes[row[2]] = sizes.get(row[2], 0) + int(row[4])
report = {
    "requests": len(rows),
    "errors": sum(int(row[3]) >= 500 for row in rows),
    "slowest": max(rows, key=lambda row: int(row[5]))[2],
    "bytes_by_path": dict(sorted(sizes.items())),
}
json.dump(report, open("report.json", "w"))
PY
