URL=http://localhost:7860
post() { curl -sf "$URL/$1" -H 'content-type: application/json' -d "$2"; }

SESSION=$(post reset '{"task_id": 3, "seed": 42}' | python3 -c 'import json, sys; print(json.load(sys.stdin)["session_id"])')
for second in $(seq 200); do
  post step '{"session_id": "'"$SESSION"'", "action": {"batch_size": 192, "kv_budget": 0.6, "quant_tier": "INT8"}}' > last.json
done
post grader '{"session_id": "'"$SESSION"'"}'
