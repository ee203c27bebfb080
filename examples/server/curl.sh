#!/usr/bin/env bash
# The HTTP API by curl: a completion, a chat over documents in three APIs, scores, a ranking, a stream.
#
# bash examples/server/curl.sh [http://127.0.0.1:8000]
#
# CHUNKATTN_API_KEY is the server's key, if it has one.
set -euo pipefail

url=${1:-http://127.0.0.1:8000}
documents='["Zenuso works as a baker. Zenuso lives in Kirora.", "Lezudo has a house in Pegelu. Lezudo likes honey."]'

# The body comes from standard input. A request that is refused ends the script, and says why.
ask() {
  local path=$1
  shift
  echo "POST $path"
  curl --silent --show-error --fail-with-body "$@" "$url$path" --data-binary @- \
    -H "Authorization: Bearer ${CHUNKATTN_API_KEY:-none}" -H 'Content-Type: application/json'
  echo
}

ask /v1/completions <<END
{"chunks": {"prefix": "Read the documents and answer the question.",
            "documents": $documents,
            "question": "Where does Lezudo live? Answer:"},
 "max_tokens": 8, "temperature": 0, "return_chunk_usage": true}
END

ask /v1/chat/completions <<END
{"messages": [{"role": "user", "content": "What is the job of Zenuso?"}],
 "documents": $documents, "max_completion_tokens": 8, "temperature": 0}
END

ask /v1/responses <<END
{"input": "What is the job of Zenuso?", "documents": $documents, "max_output_tokens": 8, "temperature": 0}
END

ask /v1/messages <<END
{"messages": [{"role": "user", "content": "What is the job of Zenuso?"}],
 "documents": $documents, "max_tokens": 8, "temperature": 0}
END

ask /v1/score <<END
{"query": "Find a person who likes honey.", "items": $documents, "labels": ["yes", "no"], "apply_softmax": true}
END

ask /v1/rerank <<END
{"query": "Find a person who likes honey.", "documents": $documents, "top_n": 1}
END

# -N: print events as they come.
ask /v1/chat/completions -N <<END
{"messages": [{"role": "user", "content": "Where does Lezudo live?"}], "documents": $documents,
 "max_completion_tokens": 8, "temperature": 0, "stream": true, "stream_options": {"include_usage": true}}
END
