{{/* Variables of a container: (dict "top" $ "user" "trainer"). `user` is who it is to Kafka. */}}
{{- define "rftstream.env" -}}
{{- $values := .top.Values -}}
{{- $kafka := include "rftstream.kafka" .top | fromJson -}}
{{- $options := "RFTSTREAM__TRANSPORT__OPTIONS__" -}}
- { name: RFTSTREAM_CONFIG, value: /work/run.toml }
- { name: RFTSTREAM__RUN__FOLDER, value: /runs }
- { name: RFTSTREAM__TRANSPORT__KIND, value: kafka }
- { name: RFTSTREAM__TRANSPORT__SERVERS, value: {{ $kafka.servers | quote }} }
- { name: {{ $options }}REPLICATION_FACTOR, value: {{ $kafka.replicationFactor | quote }} }
- { name: {{ $options }}SECURITY_PROTOCOL, value: {{ $kafka.protocol }} }
{{- if $kafka.username }}
- { name: {{ $options }}SASL_MECHANISM, value: {{ $kafka.mechanism }} }
- { name: {{ $options }}SASL_PLAIN_USERNAME, value: {{ $kafka.username | quote }} }
- { name: {{ $options }}SASL_PLAIN_PASSWORD, value: "env:KAFKA_PASSWORD" }
- name: KAFKA_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ replace "{role}" .user $kafka.passwordSecret.name }}
      key: {{ replace "{role}" .user $kafka.passwordSecret.key }}
{{- end }}
{{- if $kafka.caSecret.name }}
- { name: {{ $options }}SSL_CAFILE, value: {{ printf "/etc/kafka-ca/%s" $kafka.caSecret.key | quote }} }
{{- end }}
{{- if $kafka.certificateSecret.name }}
{{- $files := $kafka.certificateSecret }}
- { name: {{ $options }}SSL_CERTFILE, value: {{ printf "/etc/kafka-user/%s" $files.certificate | quote }} }
- { name: {{ $options }}SSL_KEYFILE, value: {{ printf "/etc/kafka-user/%s" $files.key | quote }} }
{{- end }}
- { name: RFTSTREAM__WEIGHTS__STORE, value: {{ $values.store.url | quote }} }
- { name: AWS_DEFAULT_REGION, value: {{ $values.store.region | quote }} }
{{- with $values.store.endpoint }}
- { name: AWS_ENDPOINT_URL, value: {{ . | quote }} }
{{- end }}
{{- if eq .user "reader" }}
- { name: RFTSTREAM_LOG_USER, value: reader }
{{- end }}
- { name: HOME, value: /tmp }
{{- range $name, $value := merge (dict) (default dict .env) $values.env }}
- { name: {{ $name }}, value: {{ $value | quote }} }
{{- end }}
{{- range $name, $from := $values.secretEnv }}
- { name: {{ $name }}, valueFrom: { secretKeyRef: { name: {{ $from.secret }}, key: {{ $from.key }} } } }
{{- end }}
{{- end -}}

{{/* A container without a name: (dict "top" $ "user" "trainer" "image" "" "env" dict). */}}
{{- define "rftstream.container" -}}
{{- $values := .top.Values -}}
{{- $kafka := include "rftstream.kafka" .top | fromJson -}}
image: {{ default (printf "%s:%s" $values.image.repository $values.image.tag) .image | quote }}
imagePullPolicy: {{ $values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
env:
  {{- include "rftstream.env" . | nindent 2 }}
{{- with $values.secretEnvFrom }}
envFrom:
  {{- range . }}
  - secretRef: { name: {{ . }} }
  {{- end }}
{{- end }}
volumeMounts:
  # File by file: a whole ConfigMap is mounted by way of links, and paths beside the run file would differ in each pod.
  {{- range prepend (keys $values.files | sortAlpha) "run.toml" }}
  - { name: work, mountPath: {{ printf "/work/%s" . | quote }}, subPath: {{ . | quote }}, readOnly: true }
  {{- end }}
  - { name: runs, mountPath: /runs }
  - { name: tmp, mountPath: /tmp }
  {{- if $kafka.caSecret.name }}
  - { name: kafka-ca, mountPath: /etc/kafka-ca, readOnly: true }
  {{- end }}
  {{- if $kafka.certificateSecret.name }}
  - { name: kafka-{{ .user }}, mountPath: /etc/kafka-user, readOnly: true }
  {{- end }}
  {{- if .sharedMemory }}
  - { name: shm, mountPath: /dev/shm }
  {{- end }}
  {{- with $values.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* What all pods have: (dict "top" $ "role" "trainer" "values" $role "users" (list "trainer") "claim" ""). */}}
{{- define "rftstream.podSpec" -}}
{{- $values := .top.Values -}}
{{- $kafka := include "rftstream.kafka" .top | fromJson -}}
serviceAccountName: {{ .top.Release.Name }}
automountServiceAccountToken: false
enableServiceLinks: false
# Reaps what rewards leave behind.
shareProcessNamespace: true
# A worker takes up to 30 s to finish what is in hand and 10 s more before it ends itself.
terminationGracePeriodSeconds: 60
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: { type: RuntimeDefault }
{{- with $values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - { name: {{ . }} }
  {{- end }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $.values $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
volumes:
  - { name: work, configMap: { name: {{ .top.Release.Name }} } }
  {{- if .claim }}
  - { name: runs, persistentVolumeClaim: { claimName: {{ .claim }} } }
  {{- else }}
  - { name: runs, emptyDir: {} }
  {{- end }}
  - { name: tmp, emptyDir: {} }
  {{- if $kafka.caSecret.name }}
  - name: kafka-ca
    secret:
      secretName: {{ $kafka.caSecret.name }}
      items:
        - { key: {{ $kafka.caSecret.key }}, path: {{ $kafka.caSecret.key }} }
  {{- end }}
  {{- if $kafka.certificateSecret.name }}
  {{- range .users }}
  {{- $name := replace "{role}" . $kafka.certificateSecret.name }}
  - { name: kafka-{{ . }}, secret: { secretName: {{ $name }}, defaultMode: 0440 } }
  {{- end }}
  {{- end }}
  {{- with .values.sharedMemory }}
  - { name: shm, emptyDir: { medium: Memory, sizeLimit: {{ . }} } }
  {{- end }}
  {{- with $values.volumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* The container of a worker: (dict "top" $ "role" "trainer" "values" $role "single" true). */}}
{{- define "rftstream.worker" -}}
{{- $values := .top.Values -}}
{{- $arguments := list "worker" "--role" .role "--metrics-port" "9100" "--wait-s" "600" -}}
{{- $with := dict "top" .top "user" .role "image" .values.image "env" .values.env -}}
{{- $_ := set $with "sharedMemory" .values.sharedMemory -}}
{{- with .values.device -}}{{- $arguments = concat $arguments (list "--device" .) -}}{{- end -}}
- name: worker
  {{- include "rftstream.container" $with | nindent 2 }}
  {{- if .single }}
  # Exit 0 is the end of the run. A worker that is told to leave exits with 0, too: its Job must not count as done.
  command:
    - /bin/sh
    - -c
    - |
      {{- .top.Files.Get "files/single.sh" | trim | nindent 6 }}
    - rftstream
  {{- end }}
  args: {{ toJson $arguments }}
  ports:
    - { name: metrics, containerPort: 9100 }
  # Until there is a run, and a port: the workers wait for the feeder, and for images and volumes of others.
  startupProbe:
    httpGet: { path: /livez, port: metrics }
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 90
  # /livez says so after 120 s without a sign. Loading a large model gives none, so that much more time is given.
  livenessProbe:
    httpGet: { path: /livez, port: metrics }
    periodSeconds: 30
    timeoutSeconds: 10
    failureThreshold: 20
  readinessProbe:
    httpGet: { path: /readyz, port: metrics }
    periodSeconds: 10
    timeoutSeconds: 5
  {{- $resources := deepCopy (default dict .values.resources) }}
  {{- with .values.gpus }}
  {{- $_ := set $resources "limits" (merge (dict $values.gpuResource (toString .)) (default dict $resources.limits)) }}
  {{- end }}
  resources:
    {{- toYaml $resources | nindent 4 }}
{{- end -}}
