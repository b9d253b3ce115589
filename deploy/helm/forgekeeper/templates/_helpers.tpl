{{/* Prefix of all names. */}}
{{- define "forgekeeper.name" -}}
{{- $name := contains "forgekeeper" .Release.Name | ternary .Release.Name (printf "%s-forgekeeper" .Release.Name) }}
{{- $name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Labels that select all pods of the release. */}}
{{- define "forgekeeper.selector" -}}
app.kubernetes.io/name: forgekeeper
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "forgekeeper.labels" -}}
{{ include "forgekeeper.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "forgekeeper.image" -}}
{{- with .Values.image }}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- define "forgekeeper.serviceAccount" -}}
{{- with .Values.serviceAccount }}
{{- .name | default (.create | ternary (include "forgekeeper.name" $) "default") }}
{{- end }}
{{- end }}

{{/* Seconds between SIGTERM and SIGKILL: 15 s above the time in which a process ends its work. */}}
{{- define "forgekeeper.gracePeriod" -}}
{{- $timeout := .Values.settings.FORGEKEEPER_SHUTDOWN_TIMEOUT | default "30" }}
{{- add (ceil (float64 $timeout)) 15 }}
{{- end }}

{{/* "true" if the console serves other machines; otherwise it listens on the loopback address of its pod. */}}
{{- define "forgekeeper.consoleIsServed" -}}
{{- if or .Values.console.tlsSecret .Values.console.proxy }}true{{ end }}
{{- end }}

{{/*
Environment of a container.  Arguments: root; env (settings of this process); stores, webhook, reports and traces (whether
it uses object stores, sends events to the webhook, reports errors, creates spans).  `settings` of the values have
precedence.
*/}}
{{- define "forgekeeper.env" -}}
{{- $values := .root.Values }}
{{- $secrets := "/run/secrets/forgekeeper" }}
{{- $env := dict
  "FORGEKEEPER_DATABASE_URL_FILE" (printf "%s/database_url" $secrets)
  "FORGEKEEPER_REDIS_URL_FILE" (printf "%s/redis_url" $secrets)
  "FORGEKEEPER_METRICS_HOST" "0.0.0.0"
  "FORGEKEEPER_LOG_FORMAT" "json" }}
{{- if and .stores $values.objectStores.inSecrets }}
{{- if hasKey $values.settings "FORGEKEEPER_OBJECT_STORES" }}
{{- fail "objectStores.inSecrets and settings.FORGEKEEPER_OBJECT_STORES are both set: remove one of them" }}
{{- end }}
{{- $_ := set $env "FORGEKEEPER_OBJECT_STORES_FILE" (printf "%s/object_stores" $secrets) }}
{{- end }}
{{- if $values.repositories.volume }}
{{- $_ := set $env "FORGEKEEPER_REPOSITORIES_ROOT" $values.repositories.path }}
{{- end }}
{{- if and .webhook $values.exporter.webhookSecret }}
{{- $_ := set $env "FORGEKEEPER_WEBHOOK_URL_FILE" (printf "%s/webhook_url" $secrets) }}
{{- $_ := set $env "FORGEKEEPER_WEBHOOK_SECRET_FILE" (printf "%s/webhook_secret" $secrets) }}
{{- end }}
{{- if and .reports $values.sentry.dsnSecret }}
{{- $_ := set $env "FORGEKEEPER_SENTRY_DSN_FILE" (printf "%s/sentry_dsn" $secrets) }}
{{- $_ := set $env "SENTRY_ENVIRONMENT" $values.installation }}
{{- end }}
{{- $traces := and .traces $values.tracing.endpoint }}
{{- if $traces }}
{{- $_ := set $env "FORGEKEEPER_TRACING" "otlp" }}
{{- $_ := set $env "OTEL_EXPORTER_OTLP_ENDPOINT" $values.tracing.endpoint }}
{{- $_ := mergeOverwrite $env $values.tracing.variables }}
{{- end }}
{{- range $name, $value := mergeOverwrite $env (.env | default dict) $values.settings }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- with and $traces $values.tracing.headersSecret }}
# The SDK reads no file.
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: headers}
{{- end }}
{{- end }}

{{/* Keys of Secrets as files in one folder.  Arguments: root, role, stores, webhook, reports. */}}
{{- define "forgekeeper.secretVolume" -}}
{{- $values := .root.Values -}}
- name: secrets
  projected:
    # Readable for every user of the container, which has one.
    defaultMode: 0444
    sources:
      - secret:
          name: {{ index $values.secrets .role }}
          items:
            - {key: database_url, path: database_url}
            - {key: redis_url, path: redis_url}
            {{- if and .stores $values.objectStores.inSecrets }}
            - {key: object_stores, path: object_stores}
            {{- end }}
      {{- with and .webhook $values.exporter.webhookSecret }}
      - secret:
          name: {{ . }}
          items:
            - {key: webhook_url, path: webhook_url}
            - {key: webhook_secret, path: webhook_secret}
      {{- end }}
      {{- with and .reports $values.sentry.dsnSecret }}
      - secret:
          name: {{ . }}
          items:
            - {key: sentry_dsn, path: sentry_dsn}
      {{- end }}
{{- end }}

{{/*
Template of a pod with one container.  Arguments:
root; component; role (key of `secrets`); args or command; resources; worker (name, if it is a worker); asForge (run as
the owner of the repositories); stores (uses object stores and folders of objects); webhook, reports and traces (as
forgekeeper.env); repositories ("read" or "write"); objects ("read" or "write"); env; port and portName; probe ("http",
"https", "exec" or none); volumes and mounts (more of them); restartPolicy.
*/}}
{{- define "forgekeeper.pod" -}}
{{- $values := .root.Values -}}
metadata:
  labels:
    {{- include "forgekeeper.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- with .worker }}
    worker: {{ . | quote }}
    {{- end }}
  {{- with $values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ .serviceAccount | default (include "forgekeeper.serviceAccount" .root) }}
  # No process talks to the API of Kubernetes.
  automountServiceAccountToken: false
  # Variables such as FORGEKEEPER_CONSOLE_PORT, which name a Service, would be taken for settings.
  enableServiceLinks: false
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with .restartPolicy }}
  restartPolicy: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ include "forgekeeper.gracePeriod" .root }}
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ .asForge | default false | ternary $values.forge.user 10001 | int64 }}
    runAsGroup: {{ .asForge | default false | ternary $values.forge.group 10001 | int64 }}
    seccompProfile: {type: RuntimeDefault}
  {{- if and $values.topologySpread.enabled (not .restartPolicy) }}
  topologySpreadConstraints:
    {{- range $values.topologySpread.keys }}
    - topologyKey: {{ . }}
      maxSkew: 1
      whenUnsatisfiable: {{ $values.topologySpread.whenUnsatisfiable }}
      labelSelector:
        matchLabels:
          {{- include "forgekeeper.selector" $.root | nindent 10 }}
          app.kubernetes.io/component: {{ $.component }}
          {{- with $.worker }}
          worker: {{ . | quote }}
          {{- end }}
    {{- end }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "forgekeeper.image" .root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      {{- with .command }}
      command:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .args }}
      args:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      env:
        {{- include "forgekeeper.env" . | trim | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      {{- with .resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if .port }}
      ports:
        - {name: {{ .portName }}, containerPort: {{ .port }}, protocol: TCP}
      {{- end }}
      {{- with include "forgekeeper.probes" . | trim }}
      {{- . | nindent 6 }}
      {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: secrets, mountPath: /run/secrets/forgekeeper, readOnly: true}
        {{- if and .repositories $values.repositories.volume }}
        - {name: repositories, mountPath: {{ $values.repositories.path }}, readOnly: {{ eq .repositories "read" }}}
        {{- end }}
        {{- if and .objects $values.objectStores.volume }}
        - {name: objects, mountPath: {{ $values.objectStores.path }}, readOnly: {{ eq .objects "read" }}}
        {{- end }}
        {{- with .mounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    # Workers count in files below /tmp, for their metrics.
    - name: tmp
      emptyDir: {sizeLimit: {{ $values.tmpSize }}}
    {{- include "forgekeeper.secretVolume" . | nindent 4 }}
    {{- if and .repositories $values.repositories.volume }}
    - name: repositories
      {{- toYaml $values.repositories.volume | nindent 6 }}
    {{- end }}
    {{- if and .objects $values.objectStores.volume }}
    - name: objects
      {{- toYaml $values.objectStores.volume | nindent 6 }}
    {{- end }}
    {{- with .volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/*
Probes.  /livez fails if a loop of the process has stopped, and not while servers do not answer.  /readyz fails while the
process waits for them.  The startup probe gives Python a minute to import everything.
*/}}
{{- define "forgekeeper.probes" -}}
{{- if .probe }}
startupProbe:
  {{- include "forgekeeper.probe" (dict "probe" .probe "path" "/livez" "port" .port "portName" .portName) | nindent 2 }}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 30
livenessProbe:
  {{- include "forgekeeper.probe" (dict "probe" .probe "path" "/livez" "port" .port "portName" .portName) | nindent 2 }}
  periodSeconds: 30
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  {{- include "forgekeeper.probe" (dict "probe" .probe "path" "/readyz" "port" .port "portName" .portName) | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 2
{{- end }}
{{- end }}

{{- define "forgekeeper.probe" -}}
{{- if eq .probe "exec" -}}
# The kubelet cannot reach a loopback address.
exec:
  command:
    - python
    - -Ic
    - import http.client, sys; probe = http.client.HTTPConnection('127.0.0.1', {{ .port }}, timeout=4); probe.request('GET', '{{ .path }}'); sys.exit(probe.getresponse().status != 200)
{{- else -}}
httpGet: {path: {{ .path }}, port: {{ .portName }}, scheme: {{ upper .probe }}}
{{- end }}
{{- end }}

{{/* Deployment of a process.  Arguments: as forgekeeper.pod; name; replicas (none if something else scales it). */}}
{{- define "forgekeeper.deployment" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "forgekeeper.name" .root }}-{{ .name }}
  labels:
    {{- include "forgekeeper.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
spec:
  {{- if hasKey . "replicas" }}
  replicas: {{ .replicas }}
  {{- end }}
  revisionHistoryLimit: 3
  {{- with .strategy }}
  strategy: {type: {{ . }}}
  {{- end }}
  selector:
    matchLabels:
      {{- include "forgekeeper.selector" .root | nindent 6 }}
      app.kubernetes.io/component: {{ .component }}
      {{- with .worker }}
      worker: {{ . | quote }}
      {{- end }}
  template:
    {{- include "forgekeeper.pod" . | nindent 4 }}
{{- end }}
