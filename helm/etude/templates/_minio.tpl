{{- /* MinIO for evaluation: names and labels. A StatefulSet's name has 52 characters at most: a label of its
pods (controller-revision-hash) is that and eleven more. */ -}}
{{- define "etude.minio" -}}
{{ include "etude.name" . | trunc 46 | trimSuffix "-" }}-minio
{{- end -}}

{{- define "etude.minioSelector" -}}
app.kubernetes.io/name: etude
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: minio
{{- end -}}

{{- define "etude.minioLabels" -}}
{{- merge (include "etude.minioSelector" . | fromYaml) (include "etude.labels" . | fromYaml) | toYaml -}}
{{- end -}}

{{- define "etude.minioSecret" -}}
{{ .Values.minio.secretName | default (include "etude.minio" .) }}
{{- end -}}

{{- define "etude.minioEndpoint" -}}
http://{{ include "etude.minio" . }}.{{ .Release.Namespace }}.svc:9000
{{- end -}}

{{- define "etude.minioImage" -}}
{{- $image := .Values.minio.image -}}
{{- if not $image -}}
{{- fail "minio.image: minio.enabled needs an image with the program minio on its PATH" -}}
{{- end -}}
{{- if and .Values.requireImageDigests (not (regexMatch "@sha256:[0-9a-f]{64}$" $image)) -}}
{{- fail (printf "minio.image: %s names no digest: write repo@sha256:…, or set requireImageDigests to false" $image) -}}
{{- end -}}
{{ $image }}
{{- end -}}

{{- /* The keys of the store, under the names that its clients or its server read. */ -}}
{{- define "etude.minioKeys" -}}
{{- $secret := include "etude.minioSecret" .root -}}
- name: {{ .user }}
  valueFrom: {secretKeyRef: {name: {{ $secret | quote }}, key: AWS_ACCESS_KEY_ID}}
- name: {{ .password }}
  valueFrom: {secretKeyRef: {name: {{ $secret | quote }}, key: AWS_SECRET_ACCESS_KEY}}
{{- end -}}
