{{- /* What the operator reads from its environment. */ -}}
{{- define "etude.env" -}}
- {name: ETUDE_HOST, value: "0.0.0.0"}
- {name: ETUDE_PROBE_PORT, value: "8080"}
{{- if .Values.keda.enabled }}
- {name: ETUDE_SCALER_PORT, value: "7070"}
{{- end }}
- name: ETUDE_POD
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: ETUDE_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- {name: ETUDE_LEASE, value: {{ include "etude.name" . }}-operator}
- {name: ETUDE_WATCH_NAMESPACES, value: {{ join "," .Values.watch.namespaces | quote }}}
{{- range $role := list "trainer" "inference" "rewards" "envserver" "operator" "gateway" "feedback" }}
- {name: ETUDE_IMAGE_{{ upper $role }}, value: {{ include "etude.image" (dict "root" $ "role" $role) | quote }}}
{{- end }}
- {name: ETUDE_ALLOW_WEAK_ISOLATION, value: {{ ternary "1" "0" .Values.isolation.allowProcess | quote }}}
{{- with include "etude.integrations" . }}
- {name: ETUDE_INTEGRATIONS, value: {{ . | quote }}}
{{- end }}
{{- with .Values.isolation.kvmResource }}
- {name: ETUDE_KVM_RESOURCE, value: {{ . | quote }}}
{{- end }}
{{- with .Values.nodes.pools }}
- {name: ETUDE_NODE_POOLS, value: {{ include "etude.nodePools" $ | quote }}}
{{- end }}
{{- with .Values.isolation.seccompProfile }}
- {name: ETUDE_NODE_SECCOMP_PROFILE, value: {{ . | quote }}}
{{- end }}
{{ include "etude.tlsEnv" . }}
- {name: ETUDE_API_REQUESTS_PER_S, value: {{ int .Values.operator.apiRequestsPerSecond | quote }}}
{{- with .Values.telemetry.otlpEndpoint }}
- {name: ETUDE_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{ include "etude.extraEnv" (dict "at" "operator" "own" .Values.operator "taken" "^ETUDE_") }}
{{- end -}}

{{- /* Pools with privileged nodes, NAMESPACE/NAME with commas. */ -}}
{{- define "etude.nodePools" -}}
{{- $names := list -}}
{{- range .Values.nodes.pools }}{{ $names = append $names (printf "%s/%s" .namespace .name) }}{{ end -}}
{{ join "," $names }}
{{- end -}}

{{- /* Names of the integrations that are enabled, with commas. */ -}}
{{- define "etude.integrations" -}}
{{- $enabled := list -}}
{{- range $name, $each := .Values.integrations }}{{ if $each.enabled }}{{ $enabled = append $enabled $name }}{{ end }}{{ end -}}
{{ join "," $enabled }}
{{- end -}}

{{- /* What the restricted Pod Security standard asks of a pod, and of a container. */ -}}
{{- define "etude.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "etude.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- /* Spread over machines and zones; a constraint without a selector is about the operator's pods. */ -}}
{{- define "etude.spread" -}}
{{- $own := dict "labelSelector" (dict "matchLabels" (include "etude.selector" . | fromYaml)) -}}
{{- range .Values.operator.topologySpreadConstraints }}
- {{- merge (deepCopy .) $own | toYaml | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* A label selector of the namespaces that the operator serves. */ -}}
{{- define "etude.servedNamespaces" -}}
{{- if .Values.watch.namespaces -}}
matchExpressions:
  - key: kubernetes.io/metadata.name
    operator: In
    values: {{- toYaml .Values.watch.namespaces | nindent 6 }}
{{- else -}}
{}
{{- end -}}
{{- end -}}

{{- /* Volumes of a pod with the operator's program, and where they are mounted. */ -}}
{{- define "etude.volumes" -}}
- {name: tmp, emptyDir: {}}
{{- if eq .Values.tls.mode "SelfManaged" }}
{{ include "etude.trustVolume" . }}
{{- end }}
{{ include "etude.extraVolumes" (dict "at" "operator" "own" .Values.operator "taken" (list "tmp" "tls" "tls-token" "trust")) }}
{{- end -}}

{{- define "etude.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if eq .Values.tls.mode "SelfManaged" }}
{{ include "etude.trustMount" . }}
{{- end }}
{{- with .Values.operator.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}
