{{- /* Name of everything that the release owns in its namespace. */ -}}
{{- define "etude.name" -}}
{{- if contains "etude" .Release.Name -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-etude" .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "etude.account" -}}
{{ .Values.serviceAccount.name | default (printf "%s-operator" (include "etude.name" .)) }}
{{- end -}}

{{- define "etude.selector" -}}
app.kubernetes.io/name: etude
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "etude.testSelector" -}}
app.kubernetes.io/name: etude
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: test
{{- end -}}

{{- define "etude.labels" -}}
{{ include "etude.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* Image of one role: its own, or the common one. */ -}}
{{- define "etude.image" -}}
{{- $image := get .root.Values.images .role | default .root.Values.image -}}
{{- if not $image -}}
{{- fail (printf "image: there is none for %s, and none of ours is published: build one (docs/how-to/build-container-images.md), then --set image=REPO:TAG or images.%s" .role .role) -}}
{{- end -}}
{{- if and .root.Values.requireImageDigests (not (regexMatch "@sha256:[0-9a-f]{64}$" $image)) -}}
{{- $value := ternary (printf "images.%s" .role) "image" (ne (get .root.Values.images .role) "") -}}
{{- fail (printf "%s: %s names no digest: write repo@sha256:…, or set requireImageDigests to false" $value $image) -}}
{{- end -}}
{{ $image }}
{{- end -}}
