{{/* What the chart knows of the run, as JSON: read from the run file, so that no number stands twice. */}}
{{- define "rftstream.run" -}}
{{- $text := required "runFile: empty, expected the text of a run file: --set-file runFile=run.toml" .Values.runFile -}}
{{- $toml := fromToml $text -}}
{{- if hasKey $toml "Error" -}}{{- fail (printf "runFile: no TOML: %v" $toml.Error) -}}{{- end -}}
{{- $name := dig "run" "name" "" $toml -}}
{{- if not (regexMatch "^[a-z0-9]([a-z0-9_-]*[a-z0-9])?$" (toString $name)) -}}
{{- fail (printf "runFile: run.name is %q, expected lower case letters, digits, - and _" (toString $name)) -}}
{{- end -}}
{{- $secret := "(password|passwd|secret|api_?key|secret_key|access_key|auth_token|credentials?)" -}}
{{- $settings := regexReplaceAll "(?m)^\\s*#.*$" $text "" -}}
{{- range regexFindAll (printf "(?i)[\\w.-]*%s[\"']?\\s*=\\s*[\"'][^\"'\\n]*" $secret) $settings -1 -}}
{{- if not (regexMatch "=\\s*[\"'](env:[A-Za-z_][A-Za-z0-9_{}]*)?$" .) -}}
{{- $key := . | splitList "=" | first | trim -}}
{{- fail (printf "runFile: %s is a secret, expected \"env:NAME\", with NAME in secretEnv" $key) -}}
{{- end -}}
{{- end -}}
{{- $facts := dict
      "name" $name
      "partitions" (dig "transport" "partitions" 64 $toml | int)
      "explorer" (dig "explorer" "max_concurrent" 64 $toml | toString | replace "auto" "64" | int)
      "verifier" (dig "verifier" "max_concurrent" 256 $toml | int)
      "evaluations" (not (empty (dig "evaluations" dict $toml)))
      "synthesiser" (hasKey $toml "synthesiser")
      "reads" (dig "synthesiser" "read" "outcomes" $toml) -}}
{{- $most := int $facts.partitions -}}
{{- $why := "each owns at least one of transport.partitions" -}}
{{- $fallback := int .Values.keda.fallbackReplicas -}}
{{- range list "explorer" "verifier" -}}
{{- $replicas := int (index $.Values.roles .).replicas -}}
{{- $scaled := index $.Values.keda . -}}
{{- if gt $replicas $most -}}
{{- fail (printf "roles.%s.replicas: %d, expected at most %d: %s" . $replicas $most $why) -}}
{{- end -}}
{{- if gt (int $scaled.max) $most -}}
{{- fail (printf "keda.%s.max: %d, expected at most %d: %s" . (int $scaled.max) $most $why) -}}
{{- end -}}
{{- if gt (int $scaled.min) (int $scaled.max) -}}
{{- fail (printf "keda.%s.min: %d, expected at most its max, %d" . (int $scaled.min) (int $scaled.max)) -}}
{{- end -}}
{{- if gt $fallback (int $scaled.max) -}}
{{- fail (printf "keda.fallbackReplicas: %d, expected at most keda.%s.max, %d" $fallback . (int $scaled.max)) -}}
{{- end -}}
{{- end -}}
{{- toJson $facts -}}
{{- end -}}

{{/* How clients reach Kafka: of the values, or of a Strimzi cluster with users. JSON. */}}
{{- define "rftstream.kafka" -}}
{{- $kafka := deepCopy .Values.kafka -}}
{{- $strimzi := .Values.strimzi -}}
{{- if and $strimzi.createCluster (not $strimzi.users) -}}
{{- fail "strimzi.createCluster: its listener asks for users, expected strimzi.users=true" -}}
{{- end -}}
{{- if $strimzi.users -}}
{{- $bootstrap := printf "%s-kafka-bootstrap.%s.svc:9093" $strimzi.cluster .Release.Namespace -}}
{{- $_ := set $kafka "servers" (default $bootstrap $kafka.servers) -}}
{{- $_ := set $kafka "protocol" "SASL_SSL" -}}
{{- $_ := set $kafka "mechanism" "SCRAM-SHA-512" -}}
{{- $_ := set $kafka "username" (printf "%s-{role}" .Release.Name) -}}
{{- $_ := set $kafka "passwordSecret" (dict "name" (printf "%s-{role}" .Release.Name) "key" "password") -}}
{{- $_ := set $kafka "caSecret" (dict "name" (printf "%s-cluster-ca-cert" $strimzi.cluster) "key" "ca.crt") -}}
{{- end -}}
{{- if not $kafka.servers -}}
{{- fail "kafka.servers: empty, expected host:port, or strimzi.users=true" -}}
{{- end -}}
{{- $protocol := $kafka.protocol -}}
{{- if and (hasPrefix "SASL" $protocol) (not (and $kafka.username $kafka.passwordSecret.name)) -}}
{{- fail (printf "kafka.protocol: %s asks for a user, expected kafka.username and passwordSecret.name" $protocol) -}}
{{- end -}}
{{- if and (not (hasPrefix "SASL" $protocol)) (or $kafka.username $kafka.passwordSecret.name) -}}
{{- fail (printf "kafka.protocol: %s knows no passwords, expected SASL_SSL, or no kafka.username" $protocol) -}}
{{- end -}}
{{- toJson $kafka -}}
{{- end -}}

{{/* Labels of an object: (dict "top" $ "role" "trainer"). */}}
{{- define "rftstream.selector" -}}
app.kubernetes.io/name: rftstream
app.kubernetes.io/instance: {{ .top.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{- define "rftstream.labels" -}}
{{ include "rftstream.selector" . }}
app.kubernetes.io/managed-by: {{ .top.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .top.Chart.Name .top.Chart.Version }}
{{- end -}}
